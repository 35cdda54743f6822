"""The connector's settings, read from `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.allowed_peers import AllowedPeers, PeerEntry, PeerPattern
from omni_kvlink.lowlevel import ConnectOptions, Device, LinkUrl, ServeOptions
from omni_kvlink.settings import (
    LARGEST_SIZE,
    FilePath,
    Integer,
    ListOf,
    MapOf,
    Seconds,
    Settings,
    Size,
    SomeOf,
    Text,
)

EXTRA = "kv_connector_extra_config: "
"""The prefix of a setting's name in errors."""


@dataclasses.dataclass(frozen=True)
class PoolServeOptions(ServeOptions):
    """Options of `KVLink.serve` here: "auto" is the device of the pools, which set the quota."""

    quota: Annotated[int, Size(least=1)] = LARGEST_SIZE
    device: Annotated[str, Device("auto")] = ""


@dataclasses.dataclass(frozen=True)
class PoolConnectOptions(ConnectOptions):
    """Options of `KVLink.connect` here: "auto" is the device of the pools."""

    device: Annotated[str, Device("auto")] = ""


@dataclasses.dataclass(frozen=True)
class EngineSettings(Settings):
    """The settings that the connectors for KV caches and for encoder outputs share."""

    url: Annotated[str, LinkUrl()] = ""  # a producer serves it, such as shm://prefill-0
    # URLs, or patterns, that a consumer may read from
    peers: Annotated[tuple[str, ...], ListOf(PeerEntry())] = ()
    model: str = ""  # a name of the weights, equal on both sides; the engine's `model` if empty
    # identities of adapters by their names; see AdapterIdentities
    adapters: Annotated[dict[str, str], MapOf(Text("sql-v3", filled=True))] = dataclasses.field(
        default_factory=dict
    )
    timeout: Annotated[float, Seconds(above=0)] = 30.0  # within which a cache must be loaded
    ttl: Annotated[float, Seconds(above=0)] = 60.0  # for which a payload stays available


@dataclasses.dataclass(frozen=True)
class VllmSettings(EngineSettings):
    """The settings of one engine; docs/vllm.md describes each."""

    peers_file: Annotated[str, FilePath()] = ""  # of more `peers`, read again when it changes
    load: Literal["async", "sync"] = "async"  # "sync": during the request's own forward pass
    # other versions of vLLM whose caches are read
    compatible_with: Annotated[tuple[str, ...], ListOf(Text("0.30.1", filled=True))] = ()
    peer_tp: Annotated[int, Integer(0)] = 0  # tensor-parallel size of the other side; 0: as here
    drain: Annotated[float, Seconds()] = 0.0  # for which a shutdown waits for unread caches
    offer_decoded: bool = False  # send the cache of a loaded prompt and its answer to a next turn
    delay_free: bool = True  # keep a request's blocks until every reader has released the cache
    serve: Annotated[dict[str, Any], SomeOf(PoolServeOptions)] = dataclasses.field(
        default_factory=dict
    )
    connect: Annotated[dict[str, Any], SomeOf(PoolConnectOptions)] = dataclasses.field(
        default_factory=dict
    )

    @classmethod
    def of(cls, extra: object, *, produces: bool, consumes: bool) -> VllmSettings:
        """Validate the mapping that vLLM passes, for an engine of these roles.

        Raises:
            SchemaError: a setting is unknown or wrong, or one that a role needs is missing.
        """
        settings = cls.read(extra, EXTRA)
        if settings.offer_decoded and not (produces and consumes):
            raise _error("offer_decoded needs the role kv_both: the engine loads, and sends")
        if produces and not settings.url:
            raise _error('url is missing: what this producer serves, such as "shm://prefill-0"')
        if consumes and not (settings.peers or settings.peers_file):
            raise _error('peers is missing: the producers to read from, ["shm://prefill-0"]')
        if consumes:
            try:
                AllowedPeers(settings.peers, settings.peers_file)
            except SchemaError as error:
                raise _error(str(error)) from None
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
    return SchemaError(f"{EXTRA}{text}")
