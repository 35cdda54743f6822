"""A request's KV to the next stage, or the news that it will not come."""

from __future__ import annotations

from ...bundle import KVCacheBundle
from ...link import KVLink, Payload
from ..config import KVConfig
from ..outputs import KVSent


class Handover:
    """The producer's end of the link to the next stage.

    Raises:
        BusyError, UnavailableError: as `KVLink.serve`.
    """

    def __init__(self, config: KVConfig):
        self._config = config
        self.link = KVLink.serve(config.sinks[0], **config.sink_options)

    def send(self, payload: Payload) -> KVSent:
        """Copy a request's KV into the link; its tensors and blocks are free again.

        Raises:
            CapacityError: the next stage left no room within `put_timeout`.
            TransferFailed: the next stage has aborted this request.
            DuplicateKeyError, SchemaError
        """
        config = self._config
        receipt = self.link.put(payload, ttl=config.ttl, timeout=config.put_timeout)
        first = payload[next(iter(payload))] if isinstance(payload, KVCacheBundle) else payload
        metadata = first.metadata
        return KVSent(receipt.ledger.nbytes, metadata.image_shape, metadata.seq_len)

    def fail(self, request_id: str, reason: str) -> None:
        """Whoever waits for this request's KV shall hear at once that it will not come."""
        self.link.fail(request_id, reason)

    def close(self) -> None:
        self.link.close()
