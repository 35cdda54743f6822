"""`RaySettings`: the settings of the transport, which travel to each actor with its class."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import ServeOptions
from omni_kvlink.settings import Seconds, Settings, SomeOf, Text


@dataclasses.dataclass(frozen=True)
class RaySettings(Settings):
    """The links of all processes of a job; docs/guides/ray.md describes each setting.

    Raises:
        SchemaError: a setting is unknown or has an invalid value, or two do not go together.
    """

    transport: Literal["shm", "auto", "zmq+tcp", "ucx"] = "shm"
    # at which each process serves; if empty, its node's address, as Ray knows it
    host: Annotated[str, Text("10.0.0.5")] = ""
    views: bool = False  # receive readonly views in place of copies
    put_timeout: Annotated[float, Seconds(above=0)] = 10.0  # that a put waits for memory
    connect_timeout: Annotated[float, Seconds(above=0)] = 3.0  # to reach the socket of a source
    timeout: Annotated[float, Seconds(above=0)] = 50.0  # of one transfer; Ray's own is 60 s
    # options of the links
    options: Annotated[dict[str, Any], SomeOf(ServeOptions)] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transport == "shm" and self.host:
            raise SchemaError(f"host={self.host!r}: it is for auto, zmq+tcp and ucx, not for shm")
        for name in ("tcp", "device"):
            if name in self.options:
                raise SchemaError(f"{name}={self.options[name]!r}: the transport sets it itself")

    @property
    def quota(self) -> int:
        """Bytes that the objects of one process may take together."""
        return ServeOptions(**self.options).quota
