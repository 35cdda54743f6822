"""`KVSink`: sends the KV of requests to the next stage, or the reason why it will not come."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from omni_kvlink import KVCacheBundle, KVLink, KVPayload
from omni_kvlink.engine.kv.hidden_states import hidden_key, hidden_payload, hidden_readers
from omni_kvlink.engine.kv.kv_partition import KVPartition
from omni_kvlink.engine.tokens.outputs import KVSent

if TYPE_CHECKING:
    import torch

    from omni_kvlink.engine.config import KVConfig

_MAX_HIDDEN_REQUESTS = 1024  # whose hidden states `fail` releases; `ttl` releases older ones


class KVSink:
    """A tensor rank's producer, `link`; each rank of the next stage receives its part.

    `heads` is of the whole model's KV. Raises as `KVLink.serve` and `KVPartition`.
    """

    def __init__(self, config: KVConfig, *, heads: int = 1, tensor: int = 0):
        partition = KVPartition(heads, len(config.sinks), config.receivers)
        self._config = config
        self._parts = [part for part in partition.parts() if part.sender == tensor]
        self._parts_each = partition.parts_each
        self._hidden_readers = hidden_readers(partition, tensor)
        self._hidden_sent: deque[str] = deque(maxlen=_MAX_HIDDEN_REQUESTS)
        self.link = KVLink.serve(config.sinks[tensor], **config.sink_options)

    def send(self, payload: KVPayload) -> KVSent:
        """Copy a request's KV into the link, as `KVProducer.put`, within `put_timeout` seconds.

        The caller's tensors may be modified again after it. After an error, call `fail`: some of
        the parts may have been sent.
        """
        ttl, largest = self._config.ttl, 0
        deadline = time.monotonic() + self._config.put_timeout
        for part in self._parts:
            timeout, piece = max(0.0, deadline - time.monotonic()), part.cut(payload)
            receipt = self.link.put(piece, readers=part.readers, ttl=ttl, timeout=timeout)
            largest = max(largest, receipt.ledger.nbytes * self._parts_each)
        first = payload[next(iter(payload))] if isinstance(payload, KVCacheBundle) else payload
        metadata, urls = first.metadata, (self.link.url,)
        return KVSent(largest, metadata.image_shape, metadata.seq_len, kv_sender_info=urls)

    def send_hidden(self, request_id: str, hidden: torch.Tensor) -> None:
        """Send a request's hidden states [tokens, hidden]; before its KV, as `send`."""
        if self._hidden_readers:
            ttl, timeout = self._config.ttl, self._config.put_timeout
            data, readers = hidden_payload(request_id, hidden), self._hidden_readers
            self.link.put(data, readers=readers, ttl=ttl, timeout=timeout)
            self._hidden_sent.append(request_id)

    def fail(self, request_id: str, reason: str) -> None:
        """Tell the next stage that a request's KV will not come; its gets end in `reason`."""
        for part in self._parts:
            self.link.fail(part.key(request_id), reason)
        if request_id in self._hidden_sent:
            self.link.fail(hidden_key(request_id), reason)

    def close(self) -> None:
        """Close the producer; what the next stage has not received is lost."""
        self.link.close()
