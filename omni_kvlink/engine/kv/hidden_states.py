"""The payload with a request's hidden states, which goes to the next stage next to its KV."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from omni_kvlink import TensorTransferData
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    import torch

    from omni_kvlink.engine.kv.kv_partition import KVPartition
    from omni_kvlink.engine.kv.kv_source import KVSource

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
