"""The settings of both connectors, read from vLLM's `…_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.peers import AllowedPeers, PeerEntry, PeerPattern
from omni_kvlink.integrations.vllm.ranks import rank_url
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

if TYPE_CHECKING:
    from typing_extensions import Self

    from omni_kvlink.integrations.vllm.ranks import EngineRank


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

    EXTRA: ClassVar[str]  # the prefix of a setting's name in errors
    EXAMPLE: ClassVar[str]  # a producer's URL

    url: Annotated[str, LinkUrl()] = ""  # a producer serves it, such as shm://prefill-0
    # URLs, or patterns, that a consumer may read from
    peers: Annotated[tuple[str, ...], ListOf(PeerEntry())] = ()
    model: str = ""  # a name of the weights, equal on both sides; the engine's `model` if empty
    # identities of adapters by their names; see AdapterIdentities
    adapters: Annotated[dict[str, str], MapOf(Text("sql-v3", filled=True))] = dataclasses.field(
        default_factory=dict
    )
    timeout: Annotated[float, Seconds(above=0)] = 30.0  # within which a payload must be loaded
    ttl: Annotated[float, Seconds(above=0)] = 60.0  # for which a payload stays available

    @classmethod
    def of(cls, extra: object, *, produces: bool, consumes: bool) -> Self:
        """Validate the mapping that vLLM passes, for an engine of these roles.

        Raises:
            SchemaError: a setting is unknown or wrong, or one that a role needs is missing.
        """
        settings = cls.read(extra, cls.EXTRA)
        if problem := settings._problem(produces, consumes):
            raise SchemaError(f"{cls.EXTRA}{problem}")
        return settings

    @property
    def default_peer(self) -> str:
        """The first URL of `peers` that is no pattern; "" if there is none."""
        return next((entry for entry in self.peers if not PeerPattern(entry).is_wild), "")

    def _problem(self, produces: bool, consumes: bool, *, peers_file: str = "") -> str:
        """The setting that an engine of these roles cannot run with, and the cure, or ""."""
        if produces and not self.url:
            return f'url is missing: what this producer serves, such as "{self.EXAMPLE}"'
        if consumes and not (self.peers or peers_file):
            return f'peers is missing: the producers to read from, ["{self.EXAMPLE}"]'
        return ""


@dataclasses.dataclass(frozen=True)
class VllmSettings(EngineSettings):
    """The settings of one engine; docs/vllm.md describes each."""

    EXTRA = "kv_connector_extra_config: "
    EXAMPLE = "shm://prefill-0"

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

    def check_ranks(self, rank: EngineRank, *, produces: bool, consumes: bool) -> None:
        """Check the settings for the number of an engine's ranks.

        Raises:
            SchemaError: a rank has no URL, or a cache could be sent before another rank's load of
                it has failed.
        """
        tp_size, peer_tp = rank.tp_size, self.peer_tp or rank.tp_size
        for url in (self.url,) if produces else ():
            rank_url(url, rank.world_size - 1)
        for url in self.peers if consumes else ():
            rank_url(url, rank.pp_size * peer_tp - 1)
        is_relay = produces and consumes and self.load == "sync"
        if is_relay and peer_tp != tp_size and rank.world_size > 1:
            raise SchemaError(
                f'{self.EXTRA}load "sync" in an engine that also sends, with peer_tp {peer_tp} and '
                f"{tp_size} ranks here: a rank would send what it computed from a part that "
                'another one failed to load; set "load": "async"'
            )

    def _problem(self, produces: bool, consumes: bool, *, peers_file: str = "") -> str:
        if self.offer_decoded and not (produces and consumes):
            return "offer_decoded needs the role kv_both: the engine loads, and sends"
        if problem := super()._problem(produces, consumes, peers_file=self.peers_file):
            return problem
        try:
            AllowedPeers(self.peers, self.peers_file if consumes else "")
        except SchemaError as error:
            return str(error)
        for name, options in (("serve", self.serve), ("connect", self.connect)):
            if options.get("device") and "quota" not in options:
                return (
                    f"{name}.device needs {name}.quota: bytes of the device's memory, which "
                    "gpu_memory_utilization must leave free"
                )
        return ""


@dataclasses.dataclass(frozen=True)
class EncoderSettings(EngineSettings):
    """The settings of one engine, whose `peers` are no patterns; see docs/vllm_encoder.md."""

    EXTRA = "ec_connector_extra_config: "
    EXAMPLE = "shm://encoder-0"

    # for a request whose load failed
    load_failure_policy: Literal["encode", "fail"] = "encode"
    timeout: Annotated[float, Seconds(above=0)] = 10.0  # within which an output must be loaded
    serve: Annotated[dict[str, Any], SomeOf(ServeOptions)] = dataclasses.field(default_factory=dict)
    connect: Annotated[dict[str, Any], SomeOf(ConnectOptions)] = dataclasses.field(
        default_factory=dict
    )

    def _problem(self, produces: bool, consumes: bool, *, peers_file: str = "") -> str:
        if wild := [entry for entry in self.peers if PeerPattern(entry).is_wild]:
            return f"peers: {', '.join(wild)} names no producer; wanted URLs without *"
        return super()._problem(produces, consumes)
