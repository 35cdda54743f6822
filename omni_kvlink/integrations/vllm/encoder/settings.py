"""The settings of the encoder-cache connector, read from `ec_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.allowed_peers import PeerPattern
from omni_kvlink.integrations.vllm.settings import EngineSettings
from omni_kvlink.lowlevel import ConnectOptions, ServeOptions
from omni_kvlink.settings import Seconds, SomeOf

EXTRA = "ec_connector_extra_config: "
"""The prefix of a setting's name in errors."""


@dataclasses.dataclass(frozen=True)
class EncoderSettings(EngineSettings):
    """The settings of one engine, whose `peers` are no patterns; see docs/vllm_encoder.md."""

    # for a request whose load failed
    load_failure_policy: Literal["encode", "fail"] = "encode"
    timeout: Annotated[float, Seconds(above=0)] = 10.0  # within which an output must be loaded
    serve: Annotated[dict[str, Any], SomeOf(ServeOptions)] = dataclasses.field(default_factory=dict)
    connect: Annotated[dict[str, Any], SomeOf(ConnectOptions)] = dataclasses.field(
        default_factory=dict
    )

    @classmethod
    def of(cls, extra: object, *, produces: bool, consumes: bool) -> EncoderSettings:
        """Validate the mapping that vLLM passes, for an engine of these roles.

        Raises:
            SchemaError: a setting is unknown or wrong, or one that a role needs is missing.
        """
        settings = cls.read(extra, EXTRA)
        problem = ""
        if wild := [entry for entry in settings.peers if PeerPattern(entry).is_wild]:
            problem = f"peers: {', '.join(wild)} names no producer; wanted URLs without *"
        elif produces and not settings.url:
            problem = 'url is missing: what this producer serves, such as "shm://encoder-0"'
        elif consumes and not settings.peers:
            problem = 'peers is missing: the producers to read from, ["shm://encoder-0"]'
        if problem:
            raise SchemaError(f"{EXTRA}{problem}")
        return settings
