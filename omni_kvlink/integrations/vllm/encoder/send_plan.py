"""The producer's scheduler: which encoder outputs are sent, and under which keys."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
from vllm.v1.request import Request

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.params import KEY, READERS, URL, read_readers
from omni_kvlink.integrations.vllm.step import OutputSave

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

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
        if str(request.get_finished_reason()) not in ("stop", "length", "repetition"):
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
