"""The connector's settings, read from a stage's YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omni_kvlink import Verify
from omni_kvlink.lowlevel import Options, check_verify

TRANSPORTS = ("shm", "zmq+ipc", "zmq+tcp", "ucx")
SECTION = "kvlink"
"""The key of the settings in a connector's `extra`; vLLM-Omni adds other keys beside it."""


@dataclasses.dataclass(frozen=True)
class OmniSettings:
    """How two stages are linked; equal on both sides.

    Args:
        transport: "shm", "zmq+ipc", "zmq+tcp" or "ucx".
        name: the deployment's name, by which sender and receiver find each other; different for
            each deployment on a machine.
        addresses: for TCP and UCX between machines, the `host:port` of each channel's sender:
            "kv0", "kv1" … for the KV caches of each rank, "data" for all other payloads. If empty,
            the sender listens on a loopback port that the system chooses and announces it.
        readers: the number of receivers of each payload.
        ttl: seconds within which every receiver must get a payload.
        put_timeout: seconds that `put` waits for memory.
        wait: seconds that `get` waits for a KV cache.
        poll: seconds that `get` waits for any other payload; vLLM-Omni polls many keys in turn.
        verify: "full" checks every byte of a payload before it is returned as a buffer; "auto"
            does not.
        options: link options of both sides, as for `KVLink.serve`: quota, directory, insecure …
        sender: link options of the sender only, such as keys and peers.
        receiver: link options of the receiver only.

    Raises:
        ValueError: a setting is unknown or has an invalid value.
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
            raise ValueError(
                f"transport {self.transport!r}; expected one of {', '.join(TRANSPORTS)}"
            )
        if self.addresses and self.transport not in ("zmq+tcp", "ucx"):
            raise ValueError(f"addresses are for zmq+tcp and ucx, not for {self.transport}")
        for field in ("readers", "ttl", "put_timeout", "wait", "poll"):
            value = getattr(self, field)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{field} {value!r}; expected a number above 0")
        if self.readers != int(self.readers):
            raise ValueError(f"readers {self.readers!r}; expected a whole number")
        check_verify(self.verify)
        self.of_sender, self.of_receiver  # noqa: B018  validate now, not at the first request

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> OmniSettings:
        """Read the settings from the dict that vLLM-Omni passes to a connector."""
        section = config.get(SECTION, {})
        if not isinstance(section, Mapping):
            raise ValueError(f"{SECTION}: {section!r}; expected a mapping")
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(map(str, set(section) - set(names)))
        if unknown:
            raise ValueError(f"{SECTION}: no {', '.join(unknown)}; there are {', '.join(names)}")
        return cls(**section)

    @property
    def of_sender(self) -> Options:
        """The link options of the sending side."""
        return _options({**self.options, **self.sender})

    @property
    def of_receiver(self) -> Options:
        """The link options of the receiving side."""
        return _options({**self.options, **self.receiver})


def _options(values: dict[str, Any]) -> Options:
    try:
        return Options(**values)
    except TypeError as error:
        names = ", ".join(field.name for field in dataclasses.fields(Options))
        raise ValueError(f"{SECTION}: {error}; a link's options are {names}") from None
