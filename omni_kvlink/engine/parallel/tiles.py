"""`SharedTiles`: the tiles of an image that are decoded on several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.engine.parallel.rank_coords import group_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from omni_kvlink.engine.parallel.batch_sync import BatchSync
    from omni_kvlink.engine.parallel.process_group import ProcessGroup


class SharedTiles:
    """Hook of a pipeline's decoder: each rank decodes its tiles of an image, the leader has all.

    It must be called on every rank of the group for the same images in the same order. Tile i is
    computed by rank i modulo `vae_patch_parallel_size` of the group; further ranks compute none.
    """

    def __init__(self, process_group: ProcessGroup, sync: BatchSync):
        self._process_group, self._sync = process_group, sync
        coords, parallel = process_group.coords, process_group.parallel
        self._degree = parallel.vae_patch_parallel_size
        self._index = group_ranks(coords.group, parallel).index(coords.rank(parallel))

    def __call__(
        self, shapes: Sequence[tuple[int, int]], compute: Callable[[int], Tensor]
    ) -> list[Tensor] | None:
        """All tiles on the group's leader, None on the others; see `TilesHook`.

        If `compute` raises on another rank, RankFailed is raised here.
        """
        indices = range(len(shapes))
        tiles: dict[int, Tensor] = {}
        failure: Exception | None = None
        try:
            if self._index < self._degree:
                tiles = {i: compute(i).contiguous() for i in indices[self._index :: self._degree]}
            if self._index == 0:
                like = tiles[0].shape[:-2]
                tiles |= {
                    i: tiles[0].new_empty((*like, *shapes[i])) for i in indices if i not in tiles
                }
        except Exception as error:
            failure = error
        self._sync.step(failure, in_pass=False)
        self._process_group.gather_tiles(tiles)
        return [tiles[i] for i in indices] if self._index == 0 else None
