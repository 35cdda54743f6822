"""`KVSink`: sends the KV of requests to the next stage, or the reason why it will not come."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from omni_kvlink import KVLink, KVPayload
from omni_kvlink.engine.kv.hidden_states import hidden_key, hidden_payload, hidden_readers
from omni_kvlink.engine.kv.kv_partition import KVPartition
from omni_kvlink.engine.kv.kv_stream import KVStream

if TYPE_CHECKING:
    import torch

    from omni_kvlink.engine.config import KVConfig
    from omni_kvlink.engine.kv_sent import KVSent

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

    def open(self) -> KVStream:
        """A `KVStream` for one request's KV."""
        return KVStream(self.link, self._parts, self._parts_each, self._config)

    def send(self, payload: KVPayload) -> KVSent:
        """Copy a request's whole KV into the link, as `KVProducer.put`.

        Blocks up to `put_timeout` seconds for memory. The caller's tensors may be modified again
        after it. After an error, call `fail`: some of the parts may have been sent.
        """
        stream = self.open()
        stream.begin(payload)
        return stream.finish()

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
