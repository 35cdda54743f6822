"""A request's KV to the next stage, or the news that it will not come."""

from __future__ import annotations

import time

from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.kv.kv_partition import KVPartition
from omni_kvlink.engine.outputs import KVSent
from omni_kvlink.link import KVLink, Payload
from omni_kvlink.payload.bundle import KVCacheBundle


class KVSink:
    """A tensor rank's end of the link to the next stage, each of whose ranks gets its part.

    Args:
        heads: KV heads of the whole model.
        tensor: which of the stage's tensor ranks this is; each has a link of its own.

    Raises:
        BusyError, UnavailableError: as `KVLink.serve`.
        SchemaError: the heads cannot be dealt evenly to the ranks of the next stage.
    """

    def __init__(self, config: KVConfig, *, heads: int = 1, tensor: int = 0):
        division = KVPartition(heads, len(config.sinks), config.receivers)
        self._config, self._shares = config, division.sent_by(tensor)
        self._parts_each = division.parts_each
        self.link = KVLink.serve(config.sinks[tensor], **config.sink_options)

    def send(self, payload: Payload) -> KVSent:
        """Copy a request's KV into the link; its tensors and blocks are free again.

        After an error, `fail` it: some of its parts may be on their way.

        Raises:
            CapacityError: the next stage left no room within `put_timeout`.
            TransferFailed: the next stage has aborted this request.
            DuplicateKeyError, SchemaError
        """
        config, largest = self._config, 0
        deadline = time.monotonic() + config.put_timeout
        for share in self._shares:
            receipt = self.link.put(
                share.cut(payload),
                readers=share.readers,
                ttl=config.ttl,
                timeout=max(0.0, deadline - time.monotonic()),
            )
            largest = max(largest, receipt.ledger.nbytes * self._parts_each)
        first = payload[next(iter(payload))] if isinstance(payload, KVCacheBundle) else payload
        return KVSent(largest, first.metadata.image_shape, first.metadata.seq_len)

    def fail(self, request_id: str, reason: str) -> None:
        """Whoever waits for a part of this request's KV hears at once that it will not come."""
        for share in self._shares:
            self.link.fail(share.key(request_id), reason)

    def close(self) -> None:
        self.link.close()
