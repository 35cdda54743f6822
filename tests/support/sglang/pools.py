"""SGLang's host pools of three kinds, in each layout, with random pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = 4
"""Tokens of a page."""
LAYERS = 3
BUDGET = 1 << 30
"""Bytes for a pool; SGLang would leave 10 GB of the machine's memory free."""
CPU = torch.device("cpu")


def build(kind: type, *args: Any, **options: Any) -> Any:
    """A pool of one of SGLang's classes, on any machine."""
    with host_memory_budget_scope(BUDGET):
        return kind(*args, **options)


def mha_pool(
    pages: int,
    *,
    layout: str = "page_first",
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 2,
    v_head_dim: int = 8,
    layers: int = LAYERS,
) -> Any:
    """A pool of K and V."""
    k = tuple(torch.zeros(PAGE, heads, 8, dtype=dtype) for _ in range(layers))
    v = tuple(torch.zeros(PAGE, heads, v_head_dim, dtype=dtype) for _ in range(layers))
    pointers = [torch.tensor([t.data_ptr() for t in ts], dtype=torch.uint64) for ts in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
        ),
        page_size=PAGE,
        head_num=heads,
        head_dim=8,
        v_head_dim=v_head_dim,
        dtype=dtype,
        device=CPU,
    )
    return build(
        get_mha_host_pool_cls(info),
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=pages * PAGE,
    )


def mla_pool(pages: int, *, layout: str = "page_first", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A pool of latent rows, which every tensor rank has."""
    rows = tuple(torch.zeros(PAGE, 1, 12, dtype=dtype) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([row.data_ptr() for row in rows], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        kv_cache_dim=12,
        dtype=dtype,
        device=CPU,
    )
    return build(
        MLATokenToKVPoolHost,
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_token_capacity=pages * PAGE,
    )


def mamba_pool(slots: int, *, side_states: bool = False) -> Any:
    """A hybrid model's pool of recurrent states: one slot is a page, of several tensors."""
    extra = (torch.zeros(2, 5, dtype=torch.int8),) if side_states else ()
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 2, 2, 4, 6, dtype=torch.float32),
        conv=(torch.zeros(LAYERS, 2, 10, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=extra,
    )
    return build(
        MambaPoolHost,
        info,
        host_to_device_ratio=(slots - 1) / 2,
        host_size=0,
        device_capacity=2,
        pin_memory=False,
        layout="page_first",
    )


def buffers(pool: Any) -> list[torch.Tensor]:
    """All memory of a pool."""
    if hasattr(pool, "temporal_buffer"):
        return [pool.temporal_buffer, *pool.conv_buffer, *pool.slot_state_buffers]
    kv = pool.kv_buffer
    return list(kv) if isinstance(kv, (list, tuple)) else [kv]


def fill(pool: Any, seed: int) -> None:
    """Fill a pool with random bytes."""
    seeded = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=seeded))


def slots(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """The indices of all slots of pages, as SGLang passes them."""
    size = pool.page_size
    return torch.tensor([page * size + slot for page in pages for slot in range(size)])


def page_bytes(pool: Any, page: int) -> bytes:
    """A page's bytes, by the pool's own accessor where it has one."""
    size = pool.page_size
    try:
        tensors = [pool.get_data_page(page * size, flat=True)]
    except NotImplementedError:
        rows = slice(page * size, (page + 1) * size)
        tensors = [pool.k_buffer[rows].flatten(), pool.v_buffer[rows].flatten()]
    return b"".join(bytes(one.contiguous().view(torch.uint8).numpy()) for one in tensors)


def storage_config(serve: str, **changes: Any) -> HiCacheStorageConfig:
    """The configuration that SGLang makes for one rank, with settings of the backend."""
    settings = {"serve": serve, "revision": "main", "timeout": 60.0, **changes.pop("kvlink", {})}
    extra = {
        "backend_name": "kvlink",
        "module_path": "omni_kvlink.integrations.sglang",
        "class_name": "KVLinkHiCache",
        "interface_v1": 1,
        "kvlink": settings,
    }
    values = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "llama",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**{**values, **changes})
