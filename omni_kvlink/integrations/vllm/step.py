"""Metadata that the scheduler sends to the workers with each step, and the report of the ranks."""

from __future__ import annotations

import dataclasses

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclasses.dataclass(frozen=True)
class PromptCache:
    """The KV cache of one prompt."""

    request_id: str  # the engine's
    key: str  # the payload's request id on the link, equal on both sides
    inputs: dict[str, str]  # digests of what the cache depends on; see `prompt_identity`
    tokens: int  # prompt tokens
    blocks: list[list[int]]  # in this engine: by vLLM's groups, and in token order
    readers: int  # the number of consumers that read the cache


@dataclasses.dataclass(frozen=True)
class Load(PromptCache):
    """A cache to load from a producer."""

    url: str = ""  # the producer's; the first of `peers` if empty
    local: int = 0  # leading tokens that the local prefix cache already holds
    is_async: bool = True  # load what is behind whole blocks, too; no forward pass waits
    error: str = ""  # why the load fails without an attempt

    def cancelled(self, reason: str) -> CancelledLoad:
        """The load as one that nobody needs any more."""
        return CancelledLoad(self.request_id, self.key, self.url, self.readers, reason)


@dataclasses.dataclass(frozen=True)
class CancelledLoad:
    """A payload that is no longer needed, whether or not its load has begun."""

    request_id: str
    key: str
    url: str
    readers: int  # 0 if it is unknown
    reason: str
    declines: bool = True  # no request of this engine reads it instead: tell the producer


@dataclasses.dataclass(frozen=True)
class FailedSave:
    """A cache that is not sent: its consumers learn the reason."""

    request_id: str
    key: str
    reason: str


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):
    """The caches of one scheduler step: saves on a producer, loads on a consumer."""

    saves: list[PromptCache] = dataclasses.field(default_factory=list)  # computed in this step
    offers: list[PromptCache] = dataclasses.field(default_factory=list)  # computed before it
    loads: list[Load] = dataclasses.field(default_factory=list)
    cancelled: list[CancelledLoad] = dataclasses.field(default_factory=list)
    held: set[str] = dataclasses.field(default_factory=set)  # finished, but their blocks are kept
    preempted: set[str] = dataclasses.field(default_factory=set)  # their blocks were freed
    failed: list[FailedSave] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class FailedLoads(KVConnectorWorkerMetadata):
    """Requests whose cache a rank could not load: the other ranks need not load theirs."""

    request_ids: frozenset[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FailedLoads:
        """The requests of both."""
        assert isinstance(other, FailedLoads)
        return FailedLoads(self.request_ids | other.request_ids)


@dataclasses.dataclass(frozen=True)
class OutputSave:
    """An encoder output to put into the link for one request's readers."""

    key: str  # the payload's request id on the link
    item: str  # vLLM's identifier of the media item
    readers: int
    adapter: str  # that the encoder runs with


@dataclasses.dataclass
class EncoderStep(ECConnectorMetadata):
    """The encoder outputs of one scheduler step."""

    saves: list[OutputSave] = dataclasses.field(default_factory=list)  # cached by the step's end
    dropped: list[str] = dataclasses.field(default_factory=list)  # keys that nobody will read
    loads: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # by item
