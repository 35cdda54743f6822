"""The metadata that the scheduler's half of the connector sends to the worker's with each step."""

from __future__ import annotations

import dataclasses

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata


@dataclasses.dataclass(frozen=True)
class Save:
    """An encoder output to put into the link for one request's readers."""

    key: str  # the payload's request id on the link
    item: str  # vLLM's identifier of the media item
    readers: int
    adapter: str  # that the encoder runs with


@dataclasses.dataclass
class EncoderStep(ECConnectorMetadata):
    """The transfers of one scheduler step."""

    saves: list[Save] = dataclasses.field(default_factory=list)  # in the encoder cache by its end
    dropped: list[str] = dataclasses.field(default_factory=list)  # keys that nobody will read
    loads: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # by item
