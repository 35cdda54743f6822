"""Workers' halves over pools that vLLM's own code lays out, on the fake device or on a real one."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    group_kernel_blocks,
)
from vllm.v1.worker.utils import allocate_kv_cache

from omni_kvlink.integrations.vllm.step import Load, PromptCache, StepMetadata
from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LAYERS = ("layer 0", "layer 1", "layer 2")
BLOCKS, BLOCK, HEADS, HEAD = 12, 16, 4, 16
TOKENS = 2 * BLOCK + 1
SENT, FILLED = [5, 2, 7], [1, 3, 8]
"""The blocks of the prompt in the producer, and in the consumer."""
ENGINE = 1
"""The engine's stream."""
UNTOUCHED = 0xEE


def full(heads: int, dtype: torch.dtype, **fields: Any) -> FullAttentionSpec:
    sizes = {"num_kv_heads": heads, "head_size": HEAD}
    return FullAttentionSpec(block_size=BLOCK, dtype=dtype, **sizes, **fields)


def latent(dtype: torch.dtype, **fields: Any) -> MLAAttentionSpec:
    fields = {"head_size": 24, **fields}
    return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, dtype=dtype, **fields)


SPECS: dict[str, Callable[[int], Any]] = {
    "bfloat16": lambda heads: full(heads, torch.bfloat16),
    "float16": lambda heads: full(heads, torch.float16),
    "float32": lambda heads: full(heads, torch.float32),
    "fp8": lambda heads: full(heads, torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
    "int8 per token": lambda heads: full(
        heads,
        torch.int8,
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        state_content_bytes=2 * HEAD + 8,
    ),
    "fp8 per token": lambda heads: full(
        heads,
        torch.float8_e4m3fn,
        kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD,
        state_content_bytes=2 * HEAD + 8,
    ),
    "nvfp4": lambda heads: full(
        heads,
        torch.uint8,
        kv_quant_mode=KVQuantMode.NVFP4,
        num_head_slots=2 * heads,
        state_content_bytes=HEAD // 2 + HEAD // 16,
    ),
    "latent": lambda heads: latent(torch.bfloat16),
    "fp8 latent": lambda heads: latent(torch.uint8, head_size=576, state_content_bytes=656),
    "padded latent": lambda heads: latent(torch.bfloat16, alignment=1000),
}
"""Specs as the attention backends of vLLM publish them, for so many KV heads."""


class RealDevice:
    """A CUDA device, with the methods of `FakeDevice` that these tests use."""

    def __init__(self) -> None:
        self.memory = torch.device("cuda")
        self._stream = torch.cuda.Stream()

    def on_stream(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def enqueue(self, stream: int, work: Callable[[], object]) -> None:
        """Enqueue a kernel that takes some milliseconds, and the work's own kernels."""
        with torch.cuda.stream(self._stream):
            # torch has no public kernel that lasts.
            torch.cuda._sleep(10_000_000)
            work()

    def run(self, stream: int) -> None:
        self._stream.synchronize()

    @contextlib.contextmanager
    def without_blocking(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class PoolWorker:
    """A rank's half of the connector; its layers write given bytes into the pools on `ENGINE`.

    Attributes:
        seen: by layer, the bytes of the blocks that the last pass read on its stream.
        invalid: blocks reported as not loaded.
        counts: the statistics so far.
    """

    def __init__(self, config: Any, spec: Any, device: Any, kernel_block: int = BLOCK):
        self.device = device
        group = KVCacheGroupSpec([*LAYERS], spec)
        memory = BLOCKS * len(LAYERS) * spec.page_size_bytes
        caches = get_kv_cache_config_from_groups(config, [group], memory)
        layout = config.cache_config.get_resolved_kv_cache_layout()
        self.pools = allocate_kv_cache(caches, device.memory, layout, [kernel_block])
        role = KVConnectorRole.WORKER
        self.worker: Any = KVConnectorFactory.create_connector(config, role, caches)
        self.worker.register_kv_caches(self.pools)
        for name in LAYERS:
            self.bytes_of(name)[:] = UNTOUCHED
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seen: dict[str, torch.Tensor] = {}
        self.invalid: set[int] = set()
        self.counts: dict[str, int] = {}

    def bytes_of(self, layer: str) -> torch.Tensor:
        """The bytes of all blocks of a layer, `[blocks, …, heads, tokens, content]`."""
        blocks: torch.Tensor = group_kernel_blocks(self.pools[layer], BLOCKS)
        return blocks.view(torch.uint8)

    def forward(
        self,
        step: StepMetadata,
        write: Mapping[str, torch.Tensor] | None = None,
        blocks: Sequence[int] = FILLED,
    ) -> set[str]:
        """A pass, in the order of vLLM's model runner, that reads or writes these blocks.

        Its thread must not wait for the device. Returns the requests whose load has ended.
        """
        worker = self.worker
        is_sync = any(not load.is_async for load in step.loads)
        with self.device.on_stream(ENGINE):
            # This stream's own memory: it is used again only behind the work that reads it.
            index = torch.tensor(blocks, device=self.device.memory)
            new = {layer: each.to(self.device.memory) for layer, each in (write or {}).items()}
            with self.device.without_blocking():
                worker.handle_preemptions(step)
                worker.bind_connector_metadata(step)
                if is_sync:
                    worker.start_load_kv(None)
                for layer in LAYERS:
                    worker.wait_for_layer_load(layer)
                    self.device.enqueue(
                        ENGINE, partial(self._compute, layer, index, new.get(layer))
                    )
                    worker.save_kv_layer(layer, self.pools[layer], None)
                if not is_sync:
                    worker.start_load_kv(None)
                worker.wait_for_save()
                _, ended = worker.get_finished(set())
                self.invalid |= worker.get_block_ids_with_load_errors()
                worker.clear_connector_metadata()
        stats = worker.get_kv_connector_stats()
        for name, value in stats.data.items() if stats else ():
            if isinstance(value, int):
                self.counts[name] = self.counts.get(name, 0) + value
        return set(ended)

    def run_until_loaded(self, name: str = "r") -> None:
        """Passes without transfers, until a load has ended."""
        until(lambda: name in self.forward(StepMetadata()), "the load has ended", timeout=60)

    def _compute(self, layer: str, blocks: torch.Tensor, new: torch.Tensor | None) -> None:
        there = self.bytes_of(layer)
        self.seen[layer] = there[blocks]
        if new is not None:
            there[blocks] = new


def bytes_like(worker: PoolWorker, seed: int, heads: slice = slice(None)) -> dict[str, Any]:
    """Random bytes for the prompt's blocks, of these of all `HEADS` heads; any for other shapes."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in LAYERS:
        shape = list(worker.bytes_of(layer)[SENT].shape)
        if heads != slice(None):
            shape[1] = HEADS
        whole = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        found[layer] = whole[:, heads]
    return found


CACHE = PromptCache("r", "key", {"tokens": "digest"}, TOKENS, [SENT], 1)


def save(**changed: Any) -> StepMetadata:
    return StepMetadata(saves=[PromptCache(**{**vars(CACHE), **changed})])


def load(**changed: Any) -> StepMetadata:
    fields = {**vars(CACHE), "blocks": [FILLED], "url": "shm://p", **changed}
    return StepMetadata(loads=[Load(**fields)])
