"""`KVSink`: sends the KV of requests to the next stage, or the reason why it will not come."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from omni_kvlink import KVLink, KVPayload, TensorTransferData
from omni_kvlink.engine.kv.kv_partition import KVPartition
from omni_kvlink.engine.kv.kv_stream import KVStream
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    import torch

    from omni_kvlink.engine.config import KVConfig
    from omni_kvlink.engine.kv.kv_source import KVSource
    from omni_kvlink.engine.tokens.outputs import KVSent

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


SENT_TIMEOUT = 5.0
"""Seconds to receive hidden states: they are sent before the KV, which has come."""
_NAME = "hidden_states"


def hidden_key(request_id: str) -> str:
    """The key of the payload."""
    return f"{request_id}/{_NAME}"


def hidden_payload(request_id: str, hidden: torch.Tensor) -> TensorTransferData:
    """Hidden states [tokens, hidden] as a payload."""
    return TensorTransferData(hidden_key(request_id), {_NAME: hidden})


def receive_hidden(
    source: KVSource, request_id: str, *, timeout: float = SENT_TIMEOUT
) -> torch.Tensor:
    """Receive what `hidden_payload` made, as a copy; blocks, and raises as `KVConsumer.get`."""
    with source.link.get(hidden_key(request_id), timeout=timeout) as data:
        if not isinstance(data, TensorTransferData):
            raise SchemaError(f"{hidden_key(request_id)} holds {data!r}, no hidden states")
        hidden: torch.Tensor = data[_NAME].clone()
        return hidden


def hidden_readers(partition: KVPartition, tensor: int) -> int:
    """Count the ranks of the next stage that get the hidden states from this tensor rank.

    Each gets them where its first part of the KV comes from.
    """
    receivers = partition.receivers
    ranks = itertools.product(
        range(receivers.cfg_parallel_size), range(receivers.tensor_parallel_size)
    )
    firsts = [partition.sent_to(RankCoords(0, *rank))[0] for rank in ranks]
    return sum(part.sender == tensor for part in firsts)
