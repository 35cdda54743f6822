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
    """How two stages are linked; equal on both sides. docs/vllm_omni.md describes each setting.

    Raises:
        ValueError: a setting is unknown or has an invalid value.
    """

    transport: str = "shm"  # one of `TRANSPORTS`
    name: str = "omni"  # the deployment's, by which sender and receiver find each other
    addresses: dict[str, str] = dataclasses.field(default_factory=dict)  # host:port by channel
    readers: int = 1  # the number of receivers of each payload
    ttl: float = 60.0  # seconds within which every receiver must get a payload
    put_timeout: float = 10.0  # seconds that `put` waits for memory
    wait: float = 5.0  # seconds that `get` waits for a KV cache
    poll: float = 0.001  # seconds that `get` waits for others; vLLM-Omni polls many keys in turn
    verify: Verify = "full"  # check every byte of a packed cache before it is returned
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # link options of both sides
    sender: dict[str, Any] = dataclasses.field(default_factory=dict)  # and of one side only
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
        try:
            Options(**self.of_sender)
            Options(**self.of_receiver)
        except TypeError as error:
            names = ", ".join(field.name for field in dataclasses.fields(Options))
            raise ValueError(f"{SECTION}: {error}; a link's options are {names}") from None

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
    def of_sender(self) -> dict[str, Any]:
        """The link options of the sending side."""
        return {**self.options, **self.sender}

    @property
    def of_receiver(self) -> dict[str, Any]:
        """The link options of the receiving side."""
        return {**self.options, **self.receiver}
