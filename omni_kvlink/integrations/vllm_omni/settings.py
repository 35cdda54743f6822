"""What a stage's YAML says about its links: read once, completely."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omni_kvlink.connectors.base import Options
from omni_kvlink.link.received import Verify, check_verify

TRANSPORTS = ("shm", "zmq+ipc", "zmq+tcp", "ucx")
SECTION = "kvlink"
"""The key of a connector's `extra` that is ours; vLLM-Omni puts what it likes beside it."""


@dataclasses.dataclass(frozen=True)
class OmniSettings:
    """How stages are linked; the same on both sides.

    Args:
        transport: "shm", "zmq+ipc", "zmq+tcp" or "ucx".
        name: where sender and receiver find each other; one deployment on a machine, one name.
        addresses: for TCP and UCX between machines, `host:port` of each channel's sender: "kv0",
            "kv1" … for the KV caches of each rank, "data" for all else. Left out, the sender takes
            a loopback port that the system chooses, and the receiver finds it by the name.
        readers: how many receivers shall have each payload.
        ttl: seconds in which they must come.
        put_timeout: seconds that `put` waits for room.
        wait: seconds that `get` waits for a KV cache; then the manager may ask again.
        poll: the same for other payloads, whose readers ask for many in turn.
        verify: "full" checks every byte of what is handed out as a buffer, "auto" does not.
        options: of the link on both sides, as in `KVLink.serve`: quota, directory, insecure …
        sender, receiver: options of one side alone, such as keys and peers.

    Raises:
        ValueError: an unknown name, or a value that cannot be.
    """

    transport: str = "shm"
    name: str = "omni"
    addresses: dict[str, str] = dataclasses.field(default_factory=dict)
    readers: int = 1
    ttl: float = 60.0
    put_timeout: float = 10.0
    wait: float = 5.0
    poll: float = 0.001
    verify: Verify = "full"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sender: dict[str, Any] = dataclasses.field(default_factory=dict)
    receiver: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport {self.transport!r}; wanted one of {', '.join(TRANSPORTS)}")
        if self.addresses and self.transport not in ("zmq+tcp", "ucx"):
            raise ValueError(f"addresses are for zmq+tcp and ucx, not for {self.transport}")
        for field in ("readers", "ttl", "put_timeout", "wait", "poll"):
            value = getattr(self, field)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{field} {value!r}; wanted a number above 0")
        if self.readers != int(self.readers):
            raise ValueError(f"readers {self.readers!r}; wanted a whole number")
        check_verify(self.verify)
        self.of_sender, self.of_receiver  # noqa: B018  refused now, not at the first request

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> OmniSettings:
        """From the one dict that vLLM-Omni gives a connector."""
        section = config.get(SECTION, {})
        if not isinstance(section, Mapping):
            raise ValueError(f"{SECTION}: {section!r}; wanted a mapping")
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(map(str, set(section) - set(names)))
        if unknown:
            raise ValueError(f"{SECTION}: no {', '.join(unknown)}; there are {', '.join(names)}")
        return cls(**section)

    @property
    def of_sender(self) -> Options:
        return _options({**self.options, **self.sender})

    @property
    def of_receiver(self) -> Options:
        return _options({**self.options, **self.receiver})


def _options(values: dict[str, Any]) -> Options:
    try:
        return Options(**values)
    except TypeError as error:
        names = ", ".join(field.name for field in dataclasses.fields(Options))
        raise ValueError(f"{SECTION}: {error}; a link's options are {names}") from None
