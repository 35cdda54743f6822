"""The path that the bytes of payloads take between two ends, and what an end requires of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

REQUIREMENTS = ("shm", "gpu", "rdma", "encrypted")
"""The values of `Options.require`."""
MAPPED = ("inproc", "shm")
"""The transports whose readers map the producer's memory."""
MAX_PATHS = 64
"""Readers whose paths `stats()` of a producer tells, at most."""
_UNTOLD = "this connector does not tell its path, and a promise that cannot be checked is not given"
_NO_GPU = "no transport of this release moves bytes from device memory to device memory"
_CURES = {
    "shm": "use shm://, or auto:// where both ends share a kernel and directory=",
    "rdma": "use ucx:// with RDMA transports alone, as in ucx_tls='rc', on both sides",
    "encrypted": "use zmq+tcp:// or auto:// with keys= and peers= on both sides, not insecure=True",
}


class LinkPath(msgspec.Struct, frozen=True):
    """The path of one connection.

    Attributes:
        transport: "inproc", "shm", "zmq+ipc", "zmq+tcp" or "ucx".
        shared_kernel: whether it is certain that both ends run on one kernel.
        encrypted: whether every byte of a payload is encrypted on its way.
        rdma: whether UCX can use nothing but RDMA.
        lanes: connections beside that of the messages that are open now.
        why: why it is this path, and none that is nearer.
    """

    transport: str
    shared_kernel: bool = False
    encrypted: bool = False
    rdma: bool = False
    lanes: int = 0
    why: str = ""

    @property
    def name(self) -> str:
        """The transport, and what is added to it, such as "zmq+tcp+curve+lanes"."""
        return f"{self.transport}{'+curve' * self.encrypted}{'+lanes' * bool(self.lanes)}"

    @property
    def names(self) -> tuple[str, str]:
        """Texts for `Ledger.path`: of a payload, and of one that comes inside its offer."""
        return self.name, f"{self.name}{'+inline' * (self.transport in MAPPED)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by their names, as JSON values."""
        return msgspec.structs.asdict(self)

    def meets(self, requirement: str) -> bool:
        """Return whether this is certain to be a path as required."""
        if requirement == "encrypted":
            return self.encrypted or self.shared_kernel  # those bytes never leave the machine
        if requirement == "shm":
            return self.shared_kernel and self.transport in MAPPED
        return requirement == "rdma" and self.rdma


SHM_PATH = LinkPath("shm", shared_kernel=True, why="both ends map the same memory")


def path_refusal(path: LinkPath | None, require: Iterable[str]) -> str:
    """Return why a path is not as required, with the cure; "" if it is."""
    for requirement in sorted(require):
        if path is None:
            return f"require={requirement!r}: {_UNTOLD}"
        if not path.meets(requirement):
            cure = _CURES.get(requirement, _NO_GPU)
            why = f" ({path.why})" if path.why else ""
            return f"require={requirement!r}, and the path is {path.name}{why}: {cure}"
    return ""
