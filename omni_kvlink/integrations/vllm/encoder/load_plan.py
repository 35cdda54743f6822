"""The consumer's scheduler: which requests wait for which encoder outputs."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.encoder.loader import ExpectedOutput
from omni_kvlink.integrations.vllm.params import Source, read_sources
from omni_kvlink.integrations.vllm.reads import PayloadReads, ReadEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

    from omni_kvlink.integrations.vllm.encoder.loader import EncoderLoader, OutputLoad

log = logging.getLogger(f"vllm.{__name__}")


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
