"""Workers' halves on the fake device and, where there is one, on a GPU; checks of the loads."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

from omni_kvlink._native import cuda
from omni_kvlink.integrations.vllm import connector
from omni_kvlink.integrations.vllm import device as pool_device
from omni_kvlink.integrations.vllm.step import StepMetadata
from omni_kvlink.payload.paged import PagedTensor
from support.devices import fake_device
from support.vllm.engine_process import transfer
from support.vllm.pools import (
    BLOCK,
    BLOCKS,
    FILLED,
    HEADS,
    SPECS,
    UNTOUCHED,
    PoolWorker,
    RealDevice,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from omni_kvlink.payload.views import TensorView


HAS_DEVICE = torch.cuda.is_available() and not cuda.missing()
GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_DEVICE, reason="no CUDA device")]
REAL = pytest.param("real", marks=GPU)
EVERY = pytest.mark.parametrize("device", ["fake", REAL], indirect=True)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fake")
    fake_device.build(made)
    return made


@pytest.fixture
def device(
    request: pytest.FixtureRequest, library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    if request.param == "real":
        yield RealDevice()
        return
    monkeypatch.setenv(cuda.ENVIRONMENT, fake_device.MIXED)
    made: Any = fake_device.install(library, monkeypatch)
    made.memory = torch.device("cpu")
    pools: list[tuple[int, int]] = []  # the memory that counts as the device's

    def holds(view: TensorView) -> bool:
        tensor = view.pool if isinstance(view, PagedTensor) else view
        return any(start <= tensor.data_ptr() < stop for start, stop in pools)

    made.holds, made.add_pool = holds, pools.append
    monkeypatch.setattr(pool_device, "is_on_device", holds)
    blocking = made.get("blocking")
    yield made
    assert made.get("blocking") == blocking, "an engine's thread waited for the device"
    gc.collect()  # unregister with this library, not with the next one


@pytest.fixture
def worker(
    model: Path,
    sockets: str,
    device: Any,
    monkeypatch: pytest.MonkeyPatch,
    leaves_nothing: None,
) -> Iterator[Callable[..., PoolWorker]]:
    """`worker(role, …)`: a rank of the producer `p`, or of an engine that reads from it."""
    monkeypatch.setattr(connector, "sibling_pids", list)
    if device.memory.type == "cpu":
        register = connector.OmniKVLinkConnector.register_kv_caches

        def on_device(self: Any, caches: dict[str, torch.Tensor]) -> None:
            memory = next(iter(caches.values())).untyped_storage()
            device.add_pool((memory.data_ptr(), memory.data_ptr() + memory.nbytes()))
            register(self, caches)

        monkeypatch.setattr(connector.OmniKVLinkConnector, "register_kv_caches", on_device)
    opened: list[PoolWorker] = []

    def worker(
        role: str,
        layout: KVCacheLayout = KVCacheLayout.LBNHC,
        kind: str = "bfloat16",
        *,
        rank: int = 0,
        ranks: int = 1,
        kernel_block: int = BLOCK,
        **extra: Any,
    ) -> PoolWorker:
        options = {"directory": sockets, "copier": "pinned"}
        if role == "producer":
            extra = {"url": "shm://p", "serve": options, "ttl": 3600, **extra}
        else:
            extra = {"peers": ["shm://p"], "connect": options, "timeout": 60, **extra}
        config: Any = VllmConfig(
            model_config=ModelConfig(model=str(model), max_model_len=512, dtype="float32"),
            cache_config=CacheConfig(block_size=BLOCK),
            kv_transfer_config=KVTransferConfig(**transfer(role, **extra)),
        )
        config.cache_config.kv_cache_layout = layout.name
        config.parallel_config.tensor_parallel_size = ranks
        config.parallel_config.rank = rank
        spec = SPECS[kind](HEADS // ranks)
        opened.append(PoolWorker(config, spec, device, kernel_block))
        return opened[-1]

    yield worker
    if device.memory.type == "cpu":
        device.hold(False)
    for each in reversed(opened):
        each.worker.shutdown()


def check_loaded(consumer: PoolWorker, sent: dict[str, torch.Tensor]) -> None:
    """The blocks are as sent, and no other byte has changed."""
    assert not consumer.invalid
    others = [block for block in range(BLOCKS) if block not in FILLED]
    for layer, expected in sent.items():
        found = consumer.bytes_of(layer).cpu()
        assert torch.equal(found[FILLED], expected), layer
        assert (found[others] == UNTOUCHED).all(), layer


def is_counted(each: PoolWorker) -> bool:
    """Whether a copy is in the counts, which a step reports after it has ended."""
    each.forward(StepMetadata())
    return any(each.counts.get(f"{kind}_bytes") for kind in ("pinned", "pageable", "device"))
