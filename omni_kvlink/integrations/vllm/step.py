"""The connector metadata that the scheduler's process sends to the worker's with each step."""

from __future__ import annotations

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclasses.dataclass(frozen=True)
class PromptCache:
    """The KV cache of one prompt.

    Attributes:
        request_id: the engine's request id.
        key: the payload's request id on the link, equal on both sides.
        prompt: the digest of the inputs that the cache depends on; see `prompt_digest`.
        tokens: the number of prompt tokens.
        blocks: the request's block ids in this engine, in token order.
        readers: the number of consumers that read the cache.
    """

    request_id: str
    key: str
    prompt: str
    tokens: int
    blocks: list[int]
    readers: int


@dataclasses.dataclass(frozen=True)
class Load(PromptCache):
    """A cache to load from a producer.

    Attributes:
        url: the producer's URL; the first of `peers` if empty.
        skip: the number of leading blocks that the local prefix cache already holds.
        is_async: whether the last token's block is loaded, too, and no forward pass waits.
    """

    url: str = ""
    skip: int = 0
    is_async: bool = True


@dataclasses.dataclass(frozen=True)
class CancelledLoad:
    """A cache that is no longer needed, whether or not its load has begun."""

    request_id: str
    key: str
    url: str
    readers: int
    reason: str


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):
    """The transfers of one scheduler step.

    Attributes:
        saves: prompts whose last tokens are computed in this step.
        loads: caches to load, on a consumer.
        cancelled: loads that are no longer needed, on a consumer.
        held: finished requests whose blocks are kept until the receipt is settled.
        failed: caches that will not be sent, with the reason, by key.
    """

    saves: list[PromptCache] = dataclasses.field(default_factory=list)
    loads: list[Load] = dataclasses.field(default_factory=list)
    cancelled: list[CancelledLoad] = dataclasses.field(default_factory=list)
    held: set[str] = dataclasses.field(default_factory=set)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
