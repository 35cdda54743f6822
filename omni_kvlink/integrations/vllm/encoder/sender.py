"""The producer's worker: puts encoder outputs into the link."""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from omni_kvlink import TensorTransferData
from omni_kvlink.errors import ClosedError, KVLinkError
from omni_kvlink.integrations.vllm.encoder.loader import OUTPUT

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from omni_kvlink import KVProducer
    from omni_kvlink.integrations.vllm.step import EncoderStep, OutputSave

log = logging.getLogger(f"vllm.{__name__}")


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
