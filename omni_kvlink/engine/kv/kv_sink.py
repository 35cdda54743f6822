"""`KVSink`: sends the KV of requests to the next stage, or the reason why it will not come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_kvlink import KVCacheBundle, KVLink, KVPayload
from omni_kvlink.engine.kv.kv_partition import KVPartition
from omni_kvlink.engine.outputs import KVSent

if TYPE_CHECKING:
    from omni_kvlink.engine.config import KVConfig


class KVSink:
    """A tensor rank's producer; each rank of the next stage receives its part.

    Args:
        config: `sinks` has the URL of each tensor rank, `receivers` the next stage's parallelism.
        heads: KV heads of the whole model.
        tensor: the tensor rank.

    Attributes:
        link: the producer.

    Raises:
        BusyError, UnavailableError: as `KVLink.serve`.
        SchemaError: the heads cannot be divided evenly among the ranks of the next stage.
    """

    def __init__(self, config: KVConfig, *, heads: int = 1, tensor: int = 0):
        partition = KVPartition(heads, len(config.sinks), config.receivers)
        self._config, self._parts = config, partition.sent_by(tensor)
        self._parts_each = partition.parts_each
        self.link = KVLink.serve(config.sinks[tensor], **config.sink_options)

    def send(self, payload: KVPayload) -> KVSent:
        """Copy a request's KV into the link; blocks at most `put_timeout` seconds.

        The caller's tensors may be modified again after it. After an error, call `fail`: some of
        the parts may have been sent.

        Raises:
            CapacityError: the link had no memory free within `put_timeout`.
            TransferFailed: the next stage aborted this request.
            DuplicateKeyError, SchemaError: as `KVProducer.put`.
        """
        config, largest = self._config, 0
        deadline = time.monotonic() + config.put_timeout
        for part in self._parts:
            receipt = self.link.put(
                part.cut(payload),
                readers=part.readers,
                ttl=config.ttl,
                timeout=max(0.0, deadline - time.monotonic()),
            )
            largest = max(largest, receipt.ledger.nbytes * self._parts_each)
        first = payload[next(iter(payload))] if isinstance(payload, KVCacheBundle) else payload
        return KVSent(largest, first.metadata.image_shape, first.metadata.seq_len)

    def fail(self, request_id: str, reason: str) -> None:
        """Tell the next stage that a request's KV will not come; its gets end in `reason`."""
        for part in self._parts:
            self.link.fail(part.key(request_id), reason)

    def close(self) -> None:
        """Close the producer; what the next stage has not received is lost."""
        self.link.close()
