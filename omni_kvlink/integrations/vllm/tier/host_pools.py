"""`HostTieringSpec`: vLLM's tiered offloading for engines whose blocks lie in host memory.

vLLM's own worker copies blocks on CUDA and XPU devices alone, so that its CPU build does not start
with tiers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from omni_kvlink.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's specification of a primary tier and others behind it, for its CPU build.

    vLLM finds it by `spec_name` and `spec_module_path`; all other settings are those of vLLM's
    `TieringOffloadingSpec`.
    """

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this rank.

        Raises:
            UnavailableError: the blocks lie on a device, or are to be stored in another layout.
        """
        on_host = all(cache.tensor.device.type == "cpu" for cache in kv_caches.tensors)
        if self.config.canonical_layout or not on_host:
            raise UnavailableError(
                "HostTieringSpec is for blocks in host memory, in their own layout: leave out "
                '"canonical_layout", and on a device write "spec_name": "TieringOffloadingSpec"'
            )
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostPoolWorker(kv_caches, self.blocks_per_chunk, region)


class HostPoolWorker(OffloadingWorker):
    """Copies blocks between a rank's pools and its part of the primary tier, in the call itself.

    Args:
        kv_caches: the pools, `[blocks, bytes of a block]`.
        blocks_per_chunk: blocks of a pool that lie in one chunk.
        region: the primary tier, mapped until `shutdown`.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ):
        self._groups = kv_caches.group_data_refs
        self._blocks_per_chunk, self._region = blocks_per_chunk, region
        self._pools = [cache.tensor for cache in kv_caches.tensors]
        self._rows = [  # of each pool: [chunks, blocks_per_chunk * bytes of a block]
            region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk)
            for cache in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Copy blocks of the pools into chunks."""
        return self._copy(job_id, src_spec, dst_spec, lambda block, row: row.copy_(block))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks into blocks of the pools."""
        return self._copy(job_id, dst_spec, src_spec, lambda block, row: block.copy_(row))

    def get_finished(self) -> list[TransferResult]:
        """The copies since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return: each copy has ended with its call."""

    def shutdown(self) -> None:
        """Unmap the primary tier."""
        self._rows.clear()
        self._region.cleanup()

    def _copy(
        self,
        job_id: int,
        blocks: GPULoadStoreSpec,
        chunks: CPULoadStoreSpec,
        copy: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> bool:
        started, nbytes = time.monotonic(), 0
        for block, row in self._pairs(blocks, chunks):
            copy(block, row)
            nbytes += row.numel()
        seconds = time.monotonic() - started
        self._finished.append(TransferResult(job_id, True, nbytes, seconds))
        return True

    def _pairs(
        self, blocks: GPULoadStoreSpec, chunks: CPULoadStoreSpec
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of each block in each of its layers' pools, and their place in its chunk.

        The blocks of a group are consecutive ones of a request: they begin and end inside a chunk.
        """
        ids, rows = iter(blocks.block_ids.tolist()), iter(chunks.chunk_ids.tolist())
        sizes = zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True)
        for layers, size, first in sizes:
            row = -1
            for index in range(first, first + size):
                part = index % self._blocks_per_chunk
                row = next(rows) if row < 0 or part == 0 else row
                block = next(ids)
                for layer in layers:
                    pool, region = self._pools[layer.tensor_idx], self._rows[layer.tensor_idx]
                    page = pool.shape[1]
                    yield pool[block], region[row, part * page : (part + 1) * page]
