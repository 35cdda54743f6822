"""The connector's settings, read from `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """The settings of one engine.

    Args:
        url: the URL that a producer serves, such as `shm://prefill-0`.
        peers: the URLs of the producers that a consumer may read from. A request names one of
            them by `remote_url`; without it the first one is used.
        load: "async" loads the whole prompt between forward passes, while other requests run;
            "sync" loads the blocks that a local prefix-cache hit would give (all but the last
            token's) during the request's own forward pass, which waits for each layer.
        model: a name of the weights, equal on both sides; the engine's `model` if empty.
        timeout: seconds within which a cache must be loaded.
        ttl: seconds for which a finished prefill stays available to its readers.
        delay_free: whether a producer keeps a request's blocks until every reader has released
            the cache.
        serve: options of `KVLink.serve`, such as quota, directory, keys, peers.
        connect: options of `KVLink.connect`.

    Raises:
        SchemaError: a value has the wrong type, or one that the engine's role needs is missing.
    """

    url: str = ""
    peers: tuple[str, ...] = ()
    load: str = "async"
    model: str = ""
    timeout: float = 30.0
    ttl: float = 60.0
    delay_free: bool = True
    serve: dict[str, Any] = dataclasses.field(default_factory=dict)
    connect: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, produces: bool, consumes: bool) -> VllmSettings:
        """Validate `kv_connector_extra_config`.

        Args:
            extra: the mapping as vLLM passes it.
            produces: whether the engine is a producer.
            consumes: whether the engine is a consumer.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(extra) - set(names))
        if unknown:
            raise _error(f"has no {', '.join(unknown)}; there are {', '.join(names)}")
        values = dict(extra)
        if not isinstance(values.get("peers", []), (list, tuple)):
            raise _error('peers is a list of URLs, such as ["shm://prefill-0"]')
        values["peers"] = tuple(values.get("peers", ()))
        settings = cls(**values)
        if settings.load not in ("sync", "async"):
            raise _error(f"load {settings.load!r}; wanted 'sync' or 'async'")
        if not (settings.timeout > 0 and settings.ttl > 0):
            raise _error(f"timeout {settings.timeout}, ttl {settings.ttl}: more than 0 s")
        if produces and not settings.url:
            raise _error('url is missing: what this producer serves, such as "shm://prefill-0"')
        if consumes and not settings.peers:
            raise _error('peers is missing: the producers to read from, ["shm://prefill-0"]')
        return settings


def _error(text: str) -> SchemaError:
    return SchemaError(f"kv_connector_extra_config: {text}")
