"""The settings of the encoder-cache connector, read from `ec_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.allowed_peers import PeerPattern

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """The settings of one engine; docs/vllm_encoder.md describes each."""

    url: str = ""  # what a producer serves, such as shm://encoder-0
    peers: tuple[str, ...] = ()  # URLs that a consumer may read from; the first is the default
    load_failure_policy: str = "encode"  # or "fail": what becomes of a request whose load failed
    model: str = ""  # a name of the weights, equal on both sides; the engine's `model` if empty
    timeout: float = 10.0  # seconds within which an encoder output must be loaded
    ttl: float = 60.0  # seconds for which one stays available to its readers
    serve: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of `KVLink.serve`
    connect: dict[str, Any] = dataclasses.field(default_factory=dict)  # and of `KVLink.connect`

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, produces: bool, consumes: bool) -> EncoderSettings:
        """Validate the mapping that vLLM passes, for an engine of these roles.

        Raises:
            SchemaError: a setting is unknown or wrong, or one that a role needs is missing.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        given = {name: value for name, value in extra.items() if name in known}
        problems = [
            f"{name} is unknown; there are {', '.join(known)}"
            for name in extra
            if name not in known
        ]
        if isinstance(given.get("peers", ()), (list, tuple)):
            given["peers"] = tuple(given.get("peers", ()))
            if wild := [entry for entry in given["peers"] if PeerPattern(entry).is_wild]:
                text = "names no producer; wanted URLs without *"
                problems.append(f"peers: {', '.join(wild)} {text}")
        else:
            problems.append('peers must be a list of URLs, such as ["shm://encoder-0"]')
        settings = cls(**given)
        if settings.load_failure_policy not in ("encode", "fail"):
            policy = settings.load_failure_policy
            problems.append(f"load_failure_policy must be 'encode' or 'fail', not {policy!r}")
        if not (settings.timeout > 0 and settings.ttl > 0):
            problems.append(f"timeout {settings.timeout}, ttl {settings.ttl}: more than 0 s")
        if produces and not settings.url:
            problems.append('url is missing: what this producer serves, such as "shm://encoder-0"')
        if consumes and not settings.peers:
            problems.append('peers is missing: the producers to read from, ["shm://encoder-0"]')
        if problems:
            raise SchemaError(f"ec_connector_extra_config: {'; '.join(problems)}")
        return settings
