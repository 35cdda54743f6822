"""The connector's settings, read from `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.allowed_peers import PeerPattern

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """The settings of one engine; docs/vllm.md describes each."""

    url: str = ""  # what a producer serves, such as shm://prefill-0
    peers: tuple[str, ...] = ()  # URLs, or patterns, that a consumer may read from
    peers_file: str = ""  # a file of more of them, which is read again when it changes
    load: str = "async"  # or "sync": during the request's own forward pass
    model: str = ""  # a name of the weights, equal on both sides; the engine's `model` if empty
    compatible_with: tuple[str, ...] = ()  # other versions of vLLM whose caches are read
    timeout: float = 30.0  # seconds within which a cache must be loaded
    ttl: float = 60.0  # seconds for which a finished prefill stays available to its readers
    peer_tp: int = 0  # tensor-parallel size of the engines on the other side; 0: as this one
    drain: float = 0.0  # seconds for which a shutdown waits until unread caches are read
    offer_decoded: bool = False  # send the cache of a loaded prompt and its answer to a next turn
    delay_free: bool = True  # keep a request's blocks until every reader has released the cache
    serve: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of `KVLink.serve`
    connect: dict[str, Any] = dataclasses.field(default_factory=dict)  # and of `KVLink.connect`

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, produces: bool, consumes: bool) -> VllmSettings:
        """Validate the mapping that vLLM passes, for an engine of these roles.

        Raises:
            SchemaError: a setting is unknown or wrong, or one that a role needs is missing.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(extra) - set(names))
        if unknown:
            raise _error(f"has no {', '.join(unknown)}; there are {', '.join(names)}")
        lists = {"peers": 'URLs, such as ["shm://prefill-0"]', "compatible_with": "versions"}
        for name, what in lists.items():
            if not isinstance(extra.get(name, ()), (list, tuple)):
                raise _error(f"{name} is a list of {what}")
        settings = cls(**{**extra, **{name: tuple(extra.get(name, ())) for name in lists}})
        if settings.load not in ("sync", "async"):
            raise _error(f"load {settings.load!r}; wanted 'sync' or 'async'")
        if not (settings.timeout > 0 and settings.ttl > 0):
            raise _error(f"timeout {settings.timeout}, ttl {settings.ttl}: more than 0 s")
        if type(settings.peer_tp) is not int or settings.peer_tp < 0:
            raise _error(f"peer_tp {settings.peer_tp!r}: the other side's tensor-parallel size")
        if not settings.drain >= 0:
            raise _error(f"drain {settings.drain}: 0 s or more")
        if settings.offer_decoded and not (produces and consumes):
            raise _error("offer_decoded needs the role kv_both: the engine loads, and sends")
        if produces and not settings.url:
            raise _error('url is missing: what this producer serves, such as "shm://prefill-0"')
        if consumes and not (settings.peers or settings.peers_file):
            raise _error('peers is missing: the producers to read from, ["shm://prefill-0"]')
        for entry in settings.peers:
            PeerPattern(entry)
        for name, options in (("serve", settings.serve), ("connect", settings.connect)):
            if options.get("device") and "quota" not in options:
                raise _error(
                    f"{name}.device needs {name}.quota: bytes of the device's memory, which "
                    "gpu_memory_utilization must leave free"
                )
        return settings

    @property
    def default_peer(self) -> str:
        """The first URL of `peers` that is no pattern; "" if there is none."""
        return next((entry for entry in self.peers if not PeerPattern(entry).is_wild), "")


def _error(text: str) -> SchemaError:
    return SchemaError(f"kv_connector_extra_config: {text}")
