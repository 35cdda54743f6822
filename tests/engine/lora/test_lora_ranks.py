"""LoRA adapters in whole deployments, with several ranks in each stage, as processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import EngineError, LoRARequest, OmniDiffusion
from omni_kvlink.models.bagel import DenoiseParams
from support.engine.fixtures import SHAPE, STEPS, WAIT, checkpoint
from support.engine.lora_adapters import bagel_adapter, merged
from support.engine.multiproc import patient_calls
from support.processes.fork_server import NESTED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENS = 8


@pytest.fixture(autouse=True)
def _ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stage whose ranks are processes starts them as forks, and waits for their answers."""
    monkeypatch.setenv(NESTED, "1")
    with patient_calls():
        yield


def expected(tmp_path: Path, lora: LoRARequest, scale: float) -> tuple[torch.Tensor, str | None]:
    model = merged(tmp_path, lora, scale)
    generator = torch.Generator().manual_seed(3)
    contexts = model.prefill(
        "a fox", think=True, image_shape=SHAPE, generator=generator, max_think_tokens=TOKENS
    )
    steps = DenoiseParams(**{**vars(DenoiseParams.for_text_to_image()), "num_timesteps": STEPS})
    return model.render(contexts, steps, generator=generator), contexts.text


@pytest.mark.parametrize(
    "dit", [{"tensor_parallel_size": 2}, {"cfg_parallel_size": 2, "own_process": True}]
)
def test_ranks_hold_their_parts_of_an_adapter(tmp_path: Path, dit: dict[str, Any]) -> None:
    """Text and image are those of merged weights; sums over ranks are rounded otherwise."""
    lora, two = bagel_adapter(tmp_path, 7), bagel_adapter(tmp_path, 8)
    stages = [{"stage_id": 0, "tensor_parallel_size": 2}, {"stage_id": 1, **dit}]
    deployment = {"pipeline": "bagel_think", "stages": stages}
    how: dict[str, Any] = {
        "height": SHAPE[0],
        "width": SHAPE[1],
        "num_inference_steps": STEPS,
        "seed": 3,
    }
    how |= {"max_tokens": TOKENS, "temperature": 0.0, "lora_scale": 0.5}
    with OmniDiffusion(
        checkpoint(), deployment, dtype="float32", num_threads=1, max_loras=2
    ) as omni:
        assert omni.add_lora(two)
        assert omni.pin_lora(8)
        gone = LoRARequest("gone", 9, str(tmp_path / "gone"))
        with pytest.raises(EngineError, match="gone"):
            omni.add_lora(gone)
        assert omni.list_loras() == [8]
        params = [{**how, "lora_request": one} for one in (lora, gone, two)]
        params.append({**how, "lora_int_id": 8})
        outputs = omni.generate(["a fox"] * 4, params, timeout=WAIT, on_error="return")
        with pytest.raises(EngineError, match="gone"):
            outputs[1].result()
        for output, one in ((outputs[0], lora), (outputs[2], two)):
            image, text = expected(tmp_path, one, 0.5)
            assert output.text == text
            assert (output.result()[0].int() - image.int()).abs().max() <= 1
        assert torch.equal(outputs[3].result(), outputs[2].result())
        assert omni.list_loras() == [7, 8]
        assert omni.remove_lora(7)
        assert omni.list_loras() == [8]
