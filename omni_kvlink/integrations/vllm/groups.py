"""Groups of layers with one kind of cache, and which blocks of a prompt each of them needs.

Without I/O; but for `KeptBlocks` the same in the scheduler's process and in the worker's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.versions import has_bounded_replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

HEAD, LAST = "head", "last"
"""The parts of a group's blocks: those that a local prefix-cache hit would give; and the rest."""

NULL_BLOCK = 0
"""vLLM's block for positions of which a group holds nothing."""

STATE = "MambaSpec"
KINDS = (
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
    STATE,
)
"""The classes of vLLM's KV cache specs whose blocks are sent; subclasses are other kinds."""


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers of one spec that share a block table."""

    kind: str  # the class of vLLM's KV cache spec
    table: int  # the number of vLLM's group, and so of the block table
    block_size: int  # tokens per block
    layers: tuple[str, ...]
    window: int = 0  # tokens that a token sees, itself included; 0: all before it
    chunk: int = 0  # a token sees those of its own chunk of this size; 0: all before it
    retained: int = 0  # tokens before the window that vLLM keeps, too

    @property
    def is_state(self) -> bool:
        """Whether a block is a recurrent state instead of tokens."""
        return self.kind == STATE

    @property
    def is_whole(self) -> bool:
        """Whether each token needs all tokens before it."""
        return not (self.is_state or self.window or self.chunk)

    def skipped(self, position: int) -> int:
        """The number of first tokens that are not needed to compute from `position` on."""
        if self.is_state:
            return max(0, position - 1)  # the state after the last one
        if self.chunk:
            return position // self.chunk * self.chunk
        if self.window:
            return max(0, position - self.window + 1 - self.retained)
        return 0

    def blocks(self, position: int) -> range:
        """The numbers of the blocks that are needed to compute from `position` on.

        vLLM allocates exactly these for a load of `position` tokens.
        """
        skipped = self.skipped(position)
        if skipped >= position:
            return range(0)
        return range(skipped // self.block_size, -(-position // self.block_size))


@dataclasses.dataclass(frozen=True)
class CacheGroups:
    """The groups of an engine; `tables` is the number of block tables of a request."""

    groups: tuple[CacheGroup, ...]
    tables: int

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig) -> CacheGroups:
        """The groups of an engine. One of vLLM's is split where its layers' specs differ.

        Raises:
            SchemaError: a spec is of an unknown class, or with bounded replay.
        """
        tables = kv_cache_config.kv_cache_groups
        groups: list[CacheGroup] = []
        for table, vllm_group in enumerate(tables):
            by_spec: dict[Any, list[str]] = {}
            for name in vllm_group.layer_names or [""]:  # a rank may have no layer of a group
                by_spec.setdefault(spec_of(vllm_group.kv_cache_spec, name), []).append(name)
            groups += [_group(spec, table, layers) for spec, layers in by_spec.items()]
        return cls(tuple(groups), len(tables))

    @property
    def is_whole(self) -> bool:
        """Whether each group needs all tokens of a prompt."""
        return all(group.is_whole for group in self.groups)

    @property
    def has_state(self) -> bool:
        """Whether a group has recurrent states."""
        return any(group.is_state for group in self.groups)

    @property
    def alignment(self) -> int:
        """Tokens: a local prefix-cache hit is a multiple of these."""
        return math.lcm(*(group.block_size for group in self.groups))

    def prefix(self, tokens: int) -> int:
        """The longest local prefix-cache hit of a prompt, in tokens."""
        return (tokens - 1) // self.alignment * self.alignment

    def position(self, tokens: int, *, is_async: bool) -> int:
        """The tokens of a prompt that a load gives.

        Asynchronous: all but the last one, which the engine computes. Where each group needs all
        tokens, vLLM itself goes one token back; elsewhere that one's window, or the state before
        it, would not be there.
        """
        if not is_async:
            return self.prefix(tokens)
        return tokens if self.is_whole else max(1, tokens - 1)

    def sent(self, tokens: int) -> list[dict[str, range]]:
        """The numbers of the blocks to send for either kind of load, of each group, by part."""
        prefix, position = self.prefix(tokens), self.position(tokens, is_async=True)
        return [_parts(group, prefix, position) for group in self.groups]

    def needed(self, tokens: int, *, is_async: bool, local: int) -> list[range]:
        """The numbers of the blocks that a load fills, of each group.

        `local` tokens are in the local prefix cache already.
        """
        position = self.position(tokens, is_async=is_async)
        ranges = ((group, group.blocks(position)) for group in self.groups)
        return [
            range(min(blocks.stop, max(blocks.start, local // group.block_size)), blocks.stop)
            for group, blocks in ranges
        ]


class KeptBlocks:
    """References to blocks of windows in the scheduler's pool, one each, until `release`.

    vLLM frees a window's first blocks as the window moves. A consumer that begins before the
    window's last position needs them, too, and they must not change while they are copied.
    """

    def __init__(self, groups: CacheGroups):
        self._groups = [group for group in groups.groups if not (group.is_whole or group.is_state)]
        self._kept: dict[str, dict[tuple[int, int], int]] = {}  # by request: table, number -> block
        self.pool: BlockPool | None = None  # vLLM's, once there is one

    def keep(
        self, request_id: str, tables: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> list[list[int]]:
        """Keep the blocks that are needed to compute from these positions on.

        Returns the block tables, with the kept blocks where vLLM has freed them since.
        """
        merged = [[*table] for table in tables]
        kept = self._kept.setdefault(request_id, {})
        for group in self._groups if self.pool is not None else ():
            table = merged[group.table]
            for position in positions:
                for number in group.blocks(position):
                    self._keep(kept, group, number, table)
        return merged

    def release(self, request_id: str) -> None:
        """Return a request's blocks to the pool, if it has some."""
        kept = self._kept.pop(request_id, {})
        if self.pool is not None and kept:
            self.pool.free_blocks([self.pool.blocks[block] for block in kept.values()])

    def _keep(
        self, kept: dict[tuple[int, int], int], group: CacheGroup, number: int, table: list[int]
    ) -> None:
        assert self.pool is not None
        if number >= len(table):
            return
        if table[number] == NULL_BLOCK:
            table[number] = kept.get((group.table, number), NULL_BLOCK)
        elif (group.table, number) not in kept:
            self.pool.touch([self.pool.blocks[table[number]]])
            kept[group.table, number] = table[number]


def spec_of(spec: Any, layer: str) -> Any:
    """The spec of a layer: that of its group, or its own where the group has one for each."""
    specs = getattr(spec, "kv_cache_specs", None)
    return spec if specs is None else specs.get(layer, spec.first_spec)


def present(table: Sequence[int], blocks: range) -> range:
    """The blocks of a range that a block table has: the last ones, without a gap.

    A producer may have freed the first blocks of a window before its last forward pass.
    """
    start = blocks.stop
    while start > blocks.start and start <= len(table) and table[start - 1] != NULL_BLOCK:
        start -= 1
    return range(start, blocks.stop)


def _parts(group: CacheGroup, prefix: int, position: int) -> dict[str, range]:
    blocks = group.blocks(position)
    if group.is_state:
        return {LAST: blocks}
    head, border = group.blocks(prefix), prefix // group.block_size
    last = range(min(blocks.stop, max(blocks.start, border)), blocks.stop)
    return {name: part for name, part in ((HEAD, head), (LAST, last)) if part}


def _group(spec: Any, table: int, layers: list[str]) -> CacheGroup:
    kind = type(spec).__name__
    if kind not in KINDS:
        raise SchemaError(
            f"the layers {', '.join(layers):.200} have a cache of the kind {kind}; this connector "
            f"sends {', '.join(KINDS)}"
        )
    if has_bounded_replay(spec):
        raise SchemaError(
            f"the layers {', '.join(layers):.200} have a window that vLLM computes again behind a "
            "loaded prefix (bounded replay); this connector does not send such a cache"
        )
    is_window = kind.startswith("SlidingWindow")
    return CacheGroup(
        kind,
        table,
        int(spec.block_size),
        tuple(name for name in layers if name),
        window=spec.sliding_window if is_window else 0,
        chunk=getattr(spec, "attention_chunk_size", 0) if kind.startswith("Chunked") else 0,
        retained=spec.extra_retained_tokens if is_window else 0,
    )
