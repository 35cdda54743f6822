"""`attention_backend` of BAGEL's stages: what computes, and what ends the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import UnavailableError
from omni_kvlink.engine import AREngine, DiffusionEngine, OmniARConfig
from omni_kvlink.engine.config import DiffusionParallelConfig, KVConfig
from omni_kvlink.engine.executor.distributed import MultiprocExecutor
from omni_kvlink.engine.models import bagel
from omni_kvlink.engine.outputs import DiffusionSchedulerOutput
from omni_kvlink.models.bagel import loaded_stage
from omni_kvlink.models.bagel.attention import attend
from support.engine.fixtures import (
    WAIT,
    alone,
    bundle,
    checkpoint,
    close_to,
    config,
    link,
    request,
    url,
)

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.attention import DenseAttention

REFUSED = "attention_backend 'SDPA_EFFICIENT' on cpu in torch.float32: it needs a GPU"


def dense(engine: Any) -> DenseAttention:
    """What a stage's language model attends by."""
    utility = engine.executor.worker.runner.utility
    found: DenseAttention = utility.pipeline.model.language_model.model.dense
    return found


def test_a_stage_computes_by_it_also_after_a_sleep() -> None:
    how = config(None, stage="all", attention_backend="SDPA_MATH")
    with DiffusionEngine(how) as engine:
        for level in (0, 2):
            if level:
                engine.sleep(level)
                engine.wake_up()
            assert dense(engine) is not attend
            (output,) = engine.generate([request("a", need_kv_receive=False)], timeout=WAIT)
            assert close_to(output.result()[0], alone())


@pytest.mark.parametrize("name", ["auto", "", "SDPA", "TORCH_SDPA", "native"])
def test_the_default_is_sdpa_as_it_is(sockets: str, name: str) -> None:
    with link(sockets) as source:
        how = config(source, sockets, attention_backend=name)
        with DiffusionEngine(how) as engine:
            assert dense(engine) is attend
            source.put(bundle("r"))
            (output,) = engine.generate([request("r")], timeout=WAIT)
            assert output.result()[0].equal(alone())


def test_what_cannot_run_here_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both kinds of stages, before the weights are read."""

    def load_model(*_: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(loaded_stage, "load_model", load_model)
    own: dict[str, Any] = {"dtype": "float32", "attention_backend": "SDPA_EFFICIENT"}
    with pytest.raises(UnavailableError, match=REFUSED):
        DiffusionEngine(config(None, stage="all", **own))
    with pytest.raises(UnavailableError, match=REFUSED):
        AREngine(OmniARConfig(checkpoint(), **own))
    with pytest.raises(ValueError, match="attention_backend 'STA'; there are SDPA, SDPA_MATH"):
        AREngine(OmniARConfig(checkpoint(), attention_backend="STA"))


def test_it_is_for_the_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for that of offloaded weights."""
    devices = list[str]()

    def chosen(name: str, llm: Any, device: torch.device, dtype: torch.dtype) -> DenseAttention:
        devices.append(f"{name} {device} {dtype}")
        return attend

    monkeypatch.setattr(bagel, "attention_backend", chosen)
    how = config(None, enable_layerwise_offload=True, attention_backend="FLASH_ATTN")
    bagel.BagelUtility(how, torch.device("cuda"))
    assert devices == ["FLASH_ATTN cuda torch.float32"]


def test_an_ar_stage_writes_by_it(sockets: str) -> None:
    kv = KVConfig(sinks=(url(),), sink_options={"directory": sockets})
    how: dict[str, Any] = {"dtype": "float32", "think": True, "kv": kv}
    texts = []
    for name in ("auto", "SDPA_MATH"):
        with AREngine(OmniARConfig(checkpoint(), attention_backend=name, **how)) as engine:
            own = request("a", need_kv_receive=False, max_tokens=5)
            assert (dense(engine) is attend) == (name == "auto")
            texts.append(engine.generate([own], timeout=WAIT)[0].text)
    assert texts[0] == texts[1]


@pytest.mark.slow  # two processes
def test_ulysses_ranks_attend_by_it() -> None:
    ranks = DiffusionParallelConfig(ulysses_degree=2)
    how = config(None, stage="all", parallel_config=ranks, attention_backend="SDPA_MATH")
    executor = MultiprocExecutor(how)
    try:
        own = request("r", need_kv_receive=False)
        batch = executor.execute_batch(DiffusionSchedulerOutput([own]))
        image = batch.runner_outputs[0].result.result()[0]
    finally:
        executor.shutdown()
    assert close_to(image, alone())
