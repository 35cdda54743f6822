"""The connector's settings, read from a stage's YAML."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

from omni_kvlink import Verify
from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import Options
from omni_kvlink.settings import Integer, MapOf, Seconds, Settings, SomeOf, Text

if TYPE_CHECKING:
    from collections.abc import Mapping

SECTION = "kvlink"
"""The key of the settings in a connector's `extra`; vLLM-Omni adds other keys beside it."""


@dataclasses.dataclass(frozen=True)
class OmniSettings(Settings):
    """The link of two stages; equal on both sides. docs/vllm_omni.md describes each setting.

    Raises:
        SchemaError: a setting is unknown or has an invalid value.
    """

    transport: Literal["shm", "zmq+ipc", "zmq+tcp", "ucx"] = "shm"
    # the deployment's, by which sender and receiver find each other
    name: Annotated[str, Text("omni", filled=True)] = "omni"
    # host:port by channel
    addresses: Annotated[dict[str, str], MapOf(Text("10.0.0.5:7000", filled=True))] = (
        dataclasses.field(default_factory=dict)
    )
    readers: Annotated[int, Integer(1)] = 1  # the number of receivers of each payload
    ttl: Annotated[float, Seconds(above=0)] = 60.0  # for which a payload waits for its receivers
    put_timeout: Annotated[float, Seconds(above=0)] = 10.0  # that `put` waits for memory
    wait: Annotated[float, Seconds(above=0)] = 5.0  # that `get` waits for a KV cache
    # that `get` waits for others; vLLM-Omni polls many keys in turn
    poll: Annotated[float, Seconds(above=0)] = 0.001
    verify: Verify = "full"  # check every byte of a packed cache before it is returned
    # link options of both sides, and of one side only
    options: Annotated[dict[str, Any], SomeOf(Options)] = dataclasses.field(default_factory=dict)
    sender: Annotated[dict[str, Any], SomeOf(Options)] = dataclasses.field(default_factory=dict)
    receiver: Annotated[dict[str, Any], SomeOf(Options)] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.addresses and self.transport not in ("zmq+tcp", "ucx"):
            raise SchemaError(f"addresses: they are for zmq+tcp and ucx, not for {self.transport}")
        Options.read(self.of_sender, "sender.")
        Options.read(self.of_receiver, "receiver.")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> OmniSettings:
        """Read the settings from the dict that vLLM-Omni passes to a connector."""
        return cls.read(config.get(SECTION, {}), f"{SECTION}: ")

    @property
    def of_sender(self) -> dict[str, Any]:
        """The link options of the sending side."""
        return {**self.options, **self.sender}

    @property
    def of_receiver(self) -> dict[str, Any]:
        """The link options of the receiving side."""
        return {**self.options, **self.receiver}
