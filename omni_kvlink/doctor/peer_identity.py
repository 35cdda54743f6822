"""`PeerIdentity`: who serves a link for a doctor, as the payload's metadata say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from omni_kvlink import TensorTransferData
from omni_kvlink._version import __version__
from omni_kvlink.doctor.root import Root
from omni_kvlink.errors import WireError

if TYPE_CHECKING:
    from omni_kvlink.payload.bundle import Payload


class PeerIdentity(msgspec.Struct, frozen=True):
    """A process: its release, its numbers, its machine and its network namespace."""

    release: str
    pid: int
    uid: int
    host: str
    boot_id: str
    network: str

    @classmethod
    def of_process(cls) -> PeerIdentity:
        """This process."""
        root, host = Root(), os.uname().nodename
        boot_id = root.text("proc/sys/kernel/random/boot_id")
        network = root.link("proc/self/ns/net")
        return cls(__version__, os.getpid(), os.geteuid(), host, boot_id, network)

    @classmethod
    def read(cls, data: Payload) -> PeerIdentity:
        """Read a payload's metadata, of which another release may have more; WireError if wrong."""
        metadata = data.metadata if isinstance(data, TensorTransferData) else None
        try:
            return msgspec.convert(metadata, cls)
        except msgspec.ValidationError as error:
            raise WireError(f"the peer's metadata are no doctor's: {error}") from None

    def __str__(self) -> str:
        return f"omni_kvlink {self.release}, pid {self.pid} of uid {self.uid} on {self.host}"
