"""The producer: its scheduler plans which encoder outputs are sent, and its worker puts them."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
from vllm.v1.request import Request

from omni_kvlink import TensorTransferData
from omni_kvlink.errors import ClosedError, KVLinkError, SchemaError
from omni_kvlink.integrations.vllm.encoder.loading import OUTPUT
from omni_kvlink.integrations.vllm.params import KEY, READERS, URL, is_answered, read_readers
from omni_kvlink.integrations.vllm.step import OutputSave

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    import torch
    from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

    from omni_kvlink import KVProducer
    from omni_kvlink.integrations.vllm.step import EncoderStep

log = logging.getLogger(f"vllm.{__name__}")


@dataclasses.dataclass
class _SendingRequest:
    """A live request whose encoder outputs are sent."""

    request: Request
    readers: int
    adapter: str  # that the encoder runs with
    saves: dict[str, OutputSave] = dataclasses.field(default_factory=dict)  # planned, by item


class SendPlan:
    """Gives each item of each request a key of its own, and plans its put; without I/O.

    `cached` are the items in the engine's encoder cache, kept by the caller. A request's item is
    put in the first step that runs the request and has the item, computed or from before.
    """

    def __init__(
        self,
        cached: Collection[str],
        adapter: Callable[[Request], str],
        fields: PlaceholderMetadataResolver,
        *,
        url: str,
        readers: int,
    ):
        self._cached, self._adapter, self._fields = cached, adapter, fields
        self._url, self._readers = url, readers
        self._sending: dict[str, _SendingRequest] = {}
        self._dropped: list[str] = []

    def add(self, request: Request) -> None:
        """Read what a request sends; a second call does nothing."""
        if request.request_id in self._sending:
            return
        readers, error = read_readers(request.ec_transfer_params, self._readers)
        adapter = ""
        try:
            adapter = self._adapter(request) if readers and _items(request) else ""
        except SchemaError as unknown:
            readers, error = 0, str(unknown)
        if error:
            log.error("encoder outputs of %.200r are not sent: %s", request.request_id, error)
        self._sending[request.request_id] = _SendingRequest(request, readers, adapter)

    def plan(self, scheduled: Iterable[str]) -> list[OutputSave]:
        """The puts of a step that runs these requests."""
        saves = []
        for sending in (self._sending[name] for name in scheduled if name in self._sending):
            for item in _items(sending.request) if sending.readers else ():
                if item in self._cached and item not in sending.saves:
                    save = OutputSave(uuid.uuid4().hex, item, sending.readers, sending.adapter)
                    sending.saves[item] = save
                    saves.append(save)
        return saves

    def finish(self, request: Request) -> dict[str, Any] | None:
        """A request has ended: the params for its readers' requests, if its outputs were sent.

        By item, where its output is, and under `metadata` what the model needs to know of the
        media without the media themselves.
        """
        sending = self._sending.pop(request.request_id, None)
        if sending is None or not sending.saves:
            return None
        if not is_answered(request):
            self._dropped += [save.key for save in sending.saves.values()]
            return None
        metadata: dict[str, Any] = collect_ec_item_metadata(request.mm_features, self._fields)
        for item, save in sending.saves.items():
            metadata[item].update({URL: self._url, KEY: save.key, READERS: save.readers})
        return {item: metadata[item] for item in sending.saves}

    def take_dropped(self) -> list[str]:
        """The keys since the last call whose requests ended without an answer."""
        dropped, self._dropped = self._dropped, []
        return dropped


def _items(request: Request) -> list[str]:
    """The items that an encoder computes; embeddings in the prompt are not among them."""
    return [item.identifier for item in request.mm_features if item.modality != "prompt_embeds"]


class EncoderSender:
    """The sends of a producer's worker; called by the engine's thread only.

    A step's outputs are put as soon as they are computed; those of earlier steps at its start. An
    output that could not be put fails at its readers, and never the engine.
    """

    def __init__(self, link: KVProducer, identity: Mapping[str, str], ttl: float):
        self._link, self._identity, self._ttl = link, dict(identity), ttl
        self._saves: defaultdict[str, list[OutputSave]] = defaultdict(list)  # of this step, by item

    def begin(self, step: EncoderStep, cache: Mapping[str, torch.Tensor]) -> None:
        """Begin a step: put the outputs that are in the encoder cache already."""
        for key in step.dropped:
            self._link.abort(key, "the request that computed it ended early")
        for save in step.saves:
            self._saves[save.item].append(save)
        for item in self._saves.keys() & cache.keys():
            self.put(item, cache[item])

    def put(self, item: str, output: torch.Tensor) -> None:
        """Copy an output into the link, for each request of this step that sends it."""
        for save in self._saves.pop(item, ()):
            metadata = {"item": item, "identity": {**self._identity, "adapter": save.adapter}}
            try:
                data = TensorTransferData(save.key, {OUTPUT: output}, metadata)
                # timeout=0: waiting for memory would stall the engine.
                self._link.put(data, readers=save.readers, ttl=self._ttl, timeout=0.0)
            except Exception as error:
                self._fail(save, error)

    def end(self) -> None:
        """End the step: fail the outputs that it should have computed and has not."""
        for saves in self._saves.values():
            for save in saves:
                self._fail(save, KVLinkError("its step ended without it"))
        self._saves.clear()

    def close(self) -> None:
        """Close the link; unread outputs fail at their readers."""
        self._link.close()

    def _fail(self, save: OutputSave, error: Exception) -> None:
        trace = None if isinstance(error, KVLinkError) else error
        log.error("encoder output %.200r was not sent: %s", save.item, error, exc_info=trace)
        with suppress(ClosedError):
            self._link.fail(save.key, f"it could not be sent: {error!r}")
