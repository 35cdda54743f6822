"""CPU offload: the same bits, and no more weights on the device than are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from omni_kvlink.engine.config import DiffusionParallelConfig
from omni_kvlink.engine.executor.distributed import MultiprocExecutor
from omni_kvlink.engine.outputs import DiffusionSchedulerOutput
from omni_kvlink.engine.worker import GPUDiffusionWorker
from omni_kvlink.engine.worker.cpu_offload import CpuOffload, OffloadedModule
from omni_kvlink.engine.worker.offload import weights_nbytes
from support.engine.fixtures import alone, config, request

if TYPE_CHECKING:
    from collections.abc import Iterator

BOTH: dict[str, Any] = {"enable_cpu_offload": True, "enable_layerwise_offload": True}
PHOTO = (torch.arange(40 * 56 * 3) % 251).view(40, 56, 3).to(torch.uint8)


class Copies:
    """Copies to the device so far; bytes of offloaded weights there now, and the most at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count = self.peak = 0
        self._there: dict[int, int] = {}
        load, unload = OffloadedModule.load, OffloadedModule.unload

        def counted_load(weights: OffloadedModule, stream: Any = None) -> None:
            self.count += not weights.is_loaded
            load(weights, stream)
            # What lies on the device now: a module says only whether all of it does.
            self._there[id(weights)] = sum(tensor.nbytes for tensor in weights._tensors)
            self.peak = max(self.peak, self.nbytes)

        def counted_unload(weights: OffloadedModule) -> None:
            unload(weights)
            # As above.
            self._there[id(weights)] = sum(tensor.nbytes for tensor in weights._tensors)

        monkeypatch.setattr(OffloadedModule, "load", counted_load)
        monkeypatch.setattr(OffloadedModule, "unload", counted_unload)

    @property
    def nbytes(self) -> int:
        return sum(self._there.values())


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


@pytest.fixture
def worker() -> Iterator[GPUDiffusionWorker]:
    made = GPUDiffusionWorker(0, 0, config(None, stage="all", **BOTH))
    made.init_device()
    yield made
    made.shutdown()


def image_of(worker: GPUDiffusionWorker, prompt: Any) -> torch.Tensor:
    own = request("r", prompt, need_kv_receive=False)
    worker.runner.utility.prepare(own)
    (output,) = worker.execute_model([own]).runner_outputs
    return output.result.result()[0]


def edited() -> torch.Tensor:
    return alone(["a fox", PHOTO])


def parts(worker: GPUDiffusionWorker) -> tuple[list[nn.Module], list[nn.Module]]:
    utility = worker.runner.utility
    return list(utility.encoders_and_decoders()), list(utility.layers())


def on_device(modules: list[nn.Module]) -> int:
    return weights_nbytes({str(number): one for number, one in enumerate(modules)})


def test_images_are_the_same_and_memory_is_bounded(
    worker: GPUDiffusionWorker, copies: Copies
) -> None:
    """Of the layers two are on the device at once, of the other networks one."""
    modules, layers = parts(worker)
    assert worker.cpu_offload is not None
    assert (on_device(modules + layers), copies.count) == (0, 0)
    assert weights_nbytes(worker.runner.utility.modules()) > 0  # embeddings, and others
    seen: dict[str, list[tuple[int, int]]] = {"modules": [], "layers": []}
    for kind, own in (("modules", modules), ("layers", layers)):
        for one in own:
            one.register_forward_pre_hook(
                lambda *_, kind=kind, own=own: seen[kind].append(
                    (sum(on_device([each]) > 0 for each in own), on_device(own))
                )
            )
    assert image_of(worker, ["a fox", PHOTO]).equal(edited())
    assert len(seen["modules"]) == 4  # ViT, connector, encoder, decoder
    assert {count for count, _ in seen["modules"]} == {1}
    assert {count for count, _ in seen["layers"]} == {2}
    layer = max(nbytes for _, nbytes in seen["layers"]) // 2
    largest = max(nbytes for _, nbytes in seen["modules"])
    assert on_device(modules) == 0
    assert on_device(layers) == 2 * layer == copies.nbytes
    assert copies.peak <= 2 * layer + largest
    # Each layer is copied once for a pass, none twice: the next was prefetched.
    assert copies.count == len(seen["layers"]) + len(seen["modules"]) + 1


def test_by_module_alone_the_layers_stay(worker: GPUDiffusionWorker) -> None:
    other = GPUDiffusionWorker(0, 0, config(None, stage="all", enable_cpu_offload=True))
    other.init_device()
    modules, layers = parts(other)
    assert on_device(modules) == 0 < on_device(layers)
    assert image_of(other, "a fox").equal(alone())
    other.shutdown()


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_up(worker: GPUDiffusionWorker, level: int) -> None:
    modules, layers = parts(worker)
    assert image_of(worker, "a fox").equal(alone())
    assert worker.sleep(level)
    assert weights_nbytes(worker.runner.utility.modules()) == 0
    assert worker.wake_up()
    assert on_device(modules + layers) == 0
    assert image_of(worker, ["a fox", PHOTO]).equal(edited())
    assert on_device(modules) == 0 < on_device(layers) < on_device(layers) * len(layers)


def test_an_error_in_a_module_releases_it(copies: Copies) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    CpuOffload([module], [], torch.device("cpu"))
    with pytest.raises(RuntimeError):
        module(torch.ones(3))
    assert copies.count == 1
    assert (copies.nbytes, on_device([module])) == (0, 0)


def test_a_weight_that_is_not_loaded_cannot_be_used(worker: GPUDiffusionWorker) -> None:
    modules, _ = parts(worker)
    first = next(modules[0].parameters())
    assert first.numel() == 0
    with pytest.raises(RuntimeError):
        worker.runner.pipeline.autoencoder.decoder[0].forward(torch.ones(1, 4, 2, 2))


@pytest.mark.slow  # two processes
def test_tensor_ranks_offload_their_own_parts() -> None:
    ranks = DiffusionParallelConfig(tensor_parallel_size=2)
    batch = DiffusionSchedulerOutput([request("r", need_kv_receive=False)])
    images = []
    for how in (dict[str, Any](), BOTH):
        executor = MultiprocExecutor(config(None, stage="all", parallel_config=ranks, **how))
        try:
            images.append(executor.execute_batch(batch).runner_outputs[0].result.result())
        finally:
            executor.shutdown()
    assert images[0].equal(images[1])
