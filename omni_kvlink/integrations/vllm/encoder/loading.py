"""The consumer's scheduler: loads encoder outputs, for which requests wait, and it never."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch

from omni_kvlink import Payload, ReceivedStream, TensorTransferData
from omni_kvlink.errors import KVLinkError, SchemaError
from omni_kvlink.integrations.vllm.declining import Decliner
from omni_kvlink.integrations.vllm.identity import differences
from omni_kvlink.integrations.vllm.params import Source, read_sources
from omni_kvlink.integrations.vllm.peers import Peers
from omni_kvlink.integrations.vllm.reads import PayloadReads, ReadEnd
from omni_kvlink.integrations.vllm.step import CancelledLoad
from omni_kvlink.lowlevel import BackgroundGet, begin_get

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

    from omni_kvlink.integrations.vllm.settings import EncoderSettings
    from omni_kvlink.lowlevel import CopyInto

log = logging.getLogger(f"vllm.{__name__}")

THREADS = 4
"""Threads of each producer's loads: a producer that does not answer holds up its own only."""

UNUSED = "its reader does not need it any more"
"""The reason of an output that is aborted."""

OUTPUT = "output"
"""The name of the payload's tensor."""


@dataclasses.dataclass(frozen=True)
class ExpectedOutput:
    """The encoder output that a request needs."""

    item: str  # vLLM's identifier of the media item
    embeds: int  # rows
    adapter: str  # see `tower_adapter`

    def check(self, data: Payload, identity: Mapping[str, str], *, peer: str) -> torch.Tensor:
        """Return the encoder output in a payload, a view, if it is this one.

        Raises:
            SchemaError: it is another one, or this engine would have computed another one.
        """
        remote = data.metadata.get("identity") if isinstance(data, TensorTransferData) else None
        if not isinstance(data, TensorTransferData) or not isinstance(remote, Mapping):
            raise SchemaError(f"{peer} sent {data.request_id!r}, which is no encoder output")
        if wrong := differences({**identity, "adapter": self.adapter}, remote):
            raise SchemaError(f"the encoder of {peer} is not this engine's: {wrong}")
        if data.metadata.get("item") != self.item:
            raise SchemaError(
                f"{peer} sent the encoder output of item {data.metadata.get('item')!r:.200}; "
                f"expected that of {self.item!r:.200}"
            )
        output = data.tree.get(OUTPUT)
        if not isinstance(output, torch.Tensor) or output.dim() != 2 or len(output) != self.embeds:
            raise SchemaError(f"{peer} sent {data!r} for {self.embeds} embeddings")
        return output


class OutputLoad:
    """The load of one encoder output: a pool thread requests it, none waits, one copies it.

    `request_id` is the request whose read of the source it takes. When `is_done`, it has a
    `tensor` in memory of its own, or an `error`.
    """

    def __init__(
        self, loader: EncoderLoader, source: Source, expected: ExpectedOutput, request_id: str
    ):
        self.source, self.expected, self.request_id = source, expected, request_id
        self.tensor: torch.Tensor | None = None
        self.error = ""
        self._loader = loader
        self.get = BackgroundGet(
            source.key,
            partial(loader.peers.link, source.url),
            partial(begin_get, streamed=True),
            loader.timeout,
            url=loader.url_of(source),
            submit=partial(loader.submit, source),
            copy=self._copy,
            fail=self.fail,
            into=self._targets,
        )

    def is_done(self) -> bool:
        """Whether it has ended; does not block. Ends it if its deadline has passed."""
        if not (self.error or self.tensor is not None):
            self.get.expire()
        return bool(self.error) or self.tensor is not None

    def fail(self, error: Exception) -> None:
        """End the load without an output; one that was requested will not be loaded again."""
        if not isinstance(error, KVLinkError):
            log.error("encoder output %.200r", self.expected.item, exc_info=error)
        self.error = f"{type(error).__name__}: {error}"
        if self.get.is_requested:
            self._loader.decline(self.source, self.request_id)

    def _targets(self, stream: ReceivedStream) -> list[torch.Tensor]:
        """Return memory for the output, if it is the expected one."""
        peer = self.get.link.url
        output = self.expected.check(stream.payload, self._loader.identity, peer=peer)
        self._target = torch.empty(output.shape, dtype=output.dtype)
        return [self._target]

    def _copy(self, copies: CopyInto) -> None:
        """Take the output, which is there; each of its bytes was checked against its digest."""
        self.tensor = self._target


class EncoderLoader:
    """The links of a consumer to its producers, and the threads that connect and copy."""

    def __init__(self, settings: EncoderSettings, identity: Mapping[str, str]):
        self.peers = Peers(settings.peers, settings.connect)
        self.identity, self.timeout = identity, settings.timeout
        self._default_url = settings.default_peer
        self._pools = {url: ThreadPoolExecutor(THREADS, "kvlink-ec") for url in settings.peers}
        self._decliners = {
            url: Decliner(self.peers, pool.submit, self.timeout)
            for url, pool in self._pools.items()
        }

    def load(
        self, source: Source, expected: ExpectedOutput, request_id: str, error: str = ""
    ) -> OutputLoad:
        """Begin a load, which ends within the settings' `timeout`; never raises.

        With an `error`, a reason not to attempt it, it has ended.
        """
        load, url = OutputLoad(self, source, expected, request_id), self.url_of(source)
        error = error or source.error
        if not error and url not in self._pools:
            peers = ", ".join(self._pools)
            error = f"url is {url!r:.200}, which is not one of this engine's peers: {peers}"
        if error:
            load.fail(SchemaError(error))
        else:
            self.submit(source, load.get.request)
        return load

    def decline(self, source: Source, request_id: str) -> None:
        """Take the read of a request that does not need its output; does not block."""
        url = self.url_of(source)
        if source.error or url not in self._pools:
            return
        if source.readers == 1:
            self.submit(source, partial(self._abort, source))
        else:
            read = CancelledLoad(request_id, source.key, source.url, source.readers, UNUSED)
            self._decliners[url].decline(read)

    def submit(self, source: Source, call: Callable[[], None]) -> None:
        """Run a call in a thread of the source's producer."""
        self._pools[self.url_of(source)].submit(call)

    def url_of(self, source: Source) -> str:
        """The URL of a source's producer."""
        return source.url or self._default_url

    def close(self) -> None:
        """End all loads with an error, and close the links."""
        for decliner in self._decliners.values():
            decliner.close()
        self.peers.close()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _abort(self, source: Source) -> None:
        try:
            link = self.peers.link(source.url, timeout=self.timeout)
            link.abort(source.key, UNUSED)
        except Exception as error:  # its producer is gone, or frees it when its ttl has passed
            log.debug("encoder output %.200r was not aborted: %s", source.key, error)


@dataclasses.dataclass
class NamedSource:
    """A source that a live request names for one of its items."""

    source: Source
    is_used: bool = False  # this request has begun a load from it
    error: str = ""  # why a load from it failed


class LoadPlan:
    """Loads each item that a request names a source of, and lets the request wait until then.

    `cached` are the items in the engine's encoder cache, kept by the caller. `can_encode` is
    whether a request has the media themselves: then a failed load may end in the engine's own
    encoder, as `encodes_failed` says. Otherwise the request ends with an error; an output that the
    engine cannot encode again is kept until the last request that names it has ended.
    """

    def __init__(
        self,
        loader: EncoderLoader,
        cached: Collection[str],
        adapter: Callable[[Request], str],
        can_encode: Callable[[MultiModalFeatureSpec], bool],
        *,
        encodes_failed: bool,
    ):
        self._loader, self._cached, self._adapter = loader, cached, adapter
        self._can_encode, self._encodes_failed = can_encode, encodes_failed
        self._named: dict[str, dict[str, NamedSource]] = {}  # by live request and item
        self._reads: dict[tuple[str, Source], PayloadReads] = {}  # by item and source
        self._loads: dict[str, OutputLoad] = {}  # by item; kept until the engine takes the output
        self._unavailable: set[str] = set()  # requests to end, since the last call
        self._ended: set[str] = set()  # those that were reported, while they live

    def is_ready(self, request: Request, computed: int) -> bool:
        """Whether a request with so many computed tokens can run; begins the loads it needs."""
        named, ready = self._named_by(request), True
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            if position.offset + position.length > computed:
                ready &= self._is_item_ready(request, index, named.get(feature.identifier))
        return ready

    def has(self, item: str) -> bool:
        """Whether an item was loaded, and the engine need not encode it."""
        load = self._loads.get(item)
        return load is not None and load.is_done() and not load.error

    def take(self, request: Request, index: int) -> torch.Tensor | None:
        """The loaded output of a request's item, for the encoder cache; None if there is none."""
        feature = request.mm_features[index]
        if not self.has(feature.identifier):
            return None
        load = self._loads[feature.identifier]
        if self._can_encode(feature):
            del self._loads[feature.identifier]
        return load.tensor

    def take_unavailable(self) -> set[str]:
        """The requests since the last call that need an output which cannot be had."""
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def finish(self, request: Request) -> None:
        """A request has ended: forget what only it names, and free what it has not read."""
        self._named_by(request)  # also if it was never considered
        name = request.request_id
        for item, named in self._named.pop(name).items():
            reads = self._reads[item, named.source]
            if name not in reads.taken and reads.give_up(request) is ReadEnd.DECLINE:
                self._loader.decline(named.source, name)
            if reads.remove(request):
                del self._reads[item, named.source]
            load = None if self._sources(item) else self._loads.pop(item, None)
            if load is not None and load.get.cancel():
                self._loader.decline(load.source, load.request_id)
        self._ended.discard(name)

    def _sources(self, item: str) -> list[NamedSource]:
        """The sources that live requests name for an item."""
        return [named[item] for named in self._named.values() if item in named]

    def _named_by(self, request: Request) -> dict[str, NamedSource]:
        name, params = request.request_id, request.ec_transfer_params
        if name not in self._named:
            items = {feature.identifier for feature in request.mm_features}
            sources, unknown = read_sources(params, items)
            self._named[name] = {item: NamedSource(source) for item, source in sources.items()}
            for named in sources.items():
                reads = self._reads.setdefault(named, PayloadReads())
                reads.add(request, named[1].readers)
            if unknown:
                log.warning(
                    "request %.200r names encoder outputs of %s; its own items are %s: is `model` "
                    "the same text in both engines?",
                    name,
                    unknown,
                    sorted(items),
                )
        return self._named[name]

    def _is_item_ready(self, request: Request, index: int, named: NamedSource | None) -> bool:
        feature = request.mm_features[index]
        item = feature.identifier
        if item in self._cached and self._can_encode(feature):
            return True
        load = self._loads.get(item)
        if load is None and named is not None and not named.is_used:
            load = self._begin(request, index, named)
        if load is None:
            return self._is_encoded(request, feature, named)
        if not load.is_done():
            return False
        if not load.error:
            return True
        name = request.request_id
        log.error("encoder output %.200r of %.200r was not loaded: %s", item, name, load.error)
        del self._loads[item]
        for other in self._sources(item):
            if other.source == load.source:
                other.is_used, other.error = True, load.error
        return self._is_item_ready(request, index, named)  # whose source may be another one

    def _begin(self, request: Request, index: int, named: NamedSource) -> OutputLoad:
        item = request.mm_features[index].identifier
        embeds, adapter, error = request.get_num_encoder_embeds(index), "", ""
        try:
            adapter = self._adapter(request)
        except SchemaError as unknown:
            error = str(unknown)
        named.is_used = True
        self._reads[item, named.source].take(request)
        expected = ExpectedOutput(item, embeds, adapter)
        load = self._loader.load(named.source, expected, request.request_id, error)
        self._loads[item] = load
        return load

    def _is_encoded(
        self, request: Request, feature: MultiModalFeatureSpec, named: NamedSource | None
    ) -> bool:
        """Whether the engine encodes an item that is not loaded; else the request ends."""
        error = named.error if named is not None else ""
        if self._can_encode(feature) and (self._encodes_failed or not error):
            return True
        if request.request_id not in self._ended:
            self._ended.add(request.request_id)
            self._unavailable.add(request.request_id)
            reason = error or ("it has been evicted" if named else "it names no source of it")
            log.error(
                "request %.200r ends: encoder output %.200r cannot be had: %s",
                request.request_id,
                feature.identifier,
                reason,
            )
        return False
