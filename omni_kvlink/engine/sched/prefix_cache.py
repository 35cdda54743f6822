"""`PrefixCache`: which requests begin with blocks whose KV is computed already."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_kvlink.engine.kv.block_manager import BlockManager


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The beginning of a prompt; a whole block's hash covers its tokens and all before them."""

    num_tokens: int
    hashes: list[bytes]

    @classmethod
    def of(cls, token_ids: Sequence[int], block_size: int) -> Prefix:
        """The prefix of these tokens."""
        hashes, block_hash = list[bytes](), b""
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            tokens = array("q", token_ids[start : start + block_size]).tobytes()
            block_hash = hashlib.sha256(block_hash + tokens).digest()
            hashes.append(block_hash)
        return cls(len(token_ids), hashes)


@dataclasses.dataclass(eq=False)
class _RequestBlocks:
    """A running request: its whole blocks, and how many of them can be found by their hash."""

    blocks: list[int]
    hashes: list[bytes]
    cached: int


class PrefixCache:
    """Finds the blocks of equal leading tokens, among those that running requests have computed.

    `count_computed` returns how many tokens of each running request are computed. It is called only
    if a request that is about to run needs a block that another one computes at the moment.
    """

    def __init__(self, blocks: BlockManager, count_computed: Callable[[], Mapping[str, int]]):
        self._blocks, self._count_computed = blocks, count_computed
        self._running: dict[str, _RequestBlocks] = {}
        self._pending: dict[bytes, int] = {}  # how many running requests compute a block
        self._queries = self._hits = self._requests = 0

    def find(self, prefix: Prefix) -> list[int]:
        """The blocks that a prefix begins with.

        At least its last token is left out: a request computes one, or it would have no hidden
        state.
        """
        hashes = prefix.hashes[: max(0, prefix.num_tokens - 1) // self._blocks.block_size]
        blocks = self._blocks.find(hashes)
        if len(blocks) < len(hashes) and hashes[len(blocks)] in self._pending:
            for request_id, tokens in self._count_computed().items():
                self.computed(request_id, tokens)
            blocks = self._blocks.find(hashes)
        return blocks

    def begin(
        self, request_id: str, prefix: Prefix, blocks: Sequence[int], num_cached: int
    ) -> None:
        """A request runs in these blocks, of which the first `num_cached` are from `find`."""
        hashes = prefix.hashes
        self._running[request_id] = _RequestBlocks(list(blocks[: len(hashes)]), hashes, num_cached)
        for block_hash in hashes[num_cached:]:
            self._pending[block_hash] = self._pending.get(block_hash, 0) + 1
        self._requests += 1
        self._queries += prefix.num_tokens
        self._hits += num_cached * self._blocks.block_size

    def computed(self, request_id: str, num_tokens: int | None = None) -> None:
        """The first tokens of a request are computed, or all; one that has ended is ignored."""
        entry = self._running.get(request_id)
        if entry is None:
            return
        count = len(entry.blocks)
        if num_tokens is not None:
            count = min(count, num_tokens // self._blocks.block_size)
        for i in range(entry.cached, count):
            self._blocks.cache(entry.blocks[i], entry.hashes[i])
            self._end_pending(entry.hashes[i])
        entry.cached = max(entry.cached, count)

    def end(self, request_id: str) -> None:
        """A request has ended, with or without an error; before its blocks are free."""
        entry = self._running.pop(request_id, None)
        for block_hash in [] if entry is None else entry.hashes[entry.cached :]:
            self._end_pending(block_hash)

    def stats(self) -> dict[str, int]:
        """Requests; tokens of their prefixes, and those found; blocks now, and evicted so far."""
        return {
            "requests": self._requests,
            "queries": self._queries,
            "hits": self._hits,
            "blocks": self._blocks.num_cached,
            "evicted": self._blocks.num_evicted,
        }

    def _end_pending(self, block_hash: bytes) -> None:
        self._pending[block_hash] -= 1
        if not self._pending[block_hash]:
            del self._pending[block_hash]
