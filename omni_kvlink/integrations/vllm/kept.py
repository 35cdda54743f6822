"""Blocks of windows that vLLM would free before their cache is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.integrations.vllm.groups import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.block_pool import BlockPool

    from omni_kvlink.integrations.vllm.groups import CacheGroup, CacheGroups


class KeptBlocks:
    """References to blocks of the scheduler's pool, one each, until `release`.

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
