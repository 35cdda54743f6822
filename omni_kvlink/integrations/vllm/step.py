"""What the scheduler's half tells the worker's half with each step."""

from __future__ import annotations

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of one prompt.

    Attributes:
        request_id: the engine's name of the request.
        key: the payload's name on the link, the same on both sides.
        prompt: digest of what the cache was computed from.
        tokens: of the prompt.
        blocks: the request's blocks here, in its order.
        readers: how many consumers read it.
    """

    request_id: str
    key: str
    prompt: str
    tokens: int
    blocks: list[int]
    readers: int


@dataclasses.dataclass(frozen=True)
class Load(Cache):
    """A cache to fetch.

    Attributes:
        url: the producer's; the first of the peers if empty.
        skip: leading blocks that are here already.
        is_async: whether the block of the last token is wanted too, and no forward pass waits.
    """

    url: str = ""
    skip: int = 0
    is_async: bool = True


@dataclasses.dataclass(frozen=True)
class Drop:
    """A cache that is not wanted any more, or not at all."""

    request_id: str
    key: str
    url: str
    readers: int
    reason: str


@dataclasses.dataclass
class Step(KVConnectorMetadata):
    """One step.

    Attributes:
        saves: prompts whose last tokens are computed in this step.
        loads, drops: a consumer's.
        held: finished requests whose blocks stay until the receipt.
        failed: why a promised cache will not come, by key.
    """

    saves: list[Cache] = dataclasses.field(default_factory=list)
    loads: list[Load] = dataclasses.field(default_factory=list)
    drops: list[Drop] = dataclasses.field(default_factory=list)
    held: set[str] = dataclasses.field(default_factory=set)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
