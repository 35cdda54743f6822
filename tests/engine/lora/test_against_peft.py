"""Adapters that PEFT wrote, on BAGEL's language model: the outputs are those of PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import LoRARequest, OmniDiffusionConfig
from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline
from omni_kvlink.engine.worker import GPUDiffusionWorker
from omni_kvlink.models.bagel import DenoiseParams
from omni_kvlink.models.bagel.lora import lora_layers
from support.engine.fixtures import SHAPE, STEPS, checkpoint, request

if TYPE_CHECKING:
    from pathlib import Path

peft = pytest.importorskip("peft", reason="`make test-diffusers` installs it")

EVERY = r".*\.(q|k|v|o|gate|up|down)_proj(_moe_gen)?|.*\.mlp_moe_gen\.(gate|up|down)_proj"
CONFIGS: dict[str, dict[str, Any]] = {
    "all layers": {"target_modules": EVERY, "lora_alpha": 16},
    "the head": {"target_modules": ["lm_head", "v_proj"]},
    "rank-stabilized": {"target_modules": ["q_proj", "o_proj_moe_gen"], "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 8},
        "alpha_pattern": {r"layers\.\d+\.self_attn\.k_proj": 3, "mlp.down_proj": 64},
    },
}


def make(model: torch.nn.Module, directory: Path, **config: Any) -> LoRARequest:
    """Let PEFT write an adapter of random matrices."""
    if hasattr(model, "config"):
        del model.config  # no configuration of transformers: PEFT's model card would read it
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, **config))
    torch.manual_seed(5)
    for name, tensor in made.named_parameters():
        if "lora_" in name:
            tensor.data = torch.randn(tensor.shape) * 0.1
    made.save_pretrained(directory, save_embedding_layers=False)
    return LoRARequest("style", 3, str(directory))


def load(dtype: str = "float32") -> OmniBagelPipeline:
    return OmniBagelPipeline.from_pretrained(checkpoint(), dtype=getattr(torch, dtype))


def started_worker(dtype: str = "float32") -> GPUDiffusionWorker:
    config = OmniDiffusionConfig(checkpoint(), stage="all", dtype=dtype)
    worker = GPUDiffusionWorker(0, 0, config)
    worker.init_device()
    return worker


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("which", "root"),
    [
        *((which, root) for which in CONFIGS for root in ("", "language_model")),
        ("all layers", "language_model.model"),
        ("patterns", "language_model.model"),
    ],
)
def test_every_layer_computes_what_it_computes_in_peft(
    tmp_path: Path, which: str, root: str
) -> None:
    """The adapter was trained on the whole model, its language model, or the decoder alone."""
    lora = make(load().model.get_submodule(root), tmp_path, **CONFIGS[which])
    expected, worker = load(), started_worker()
    peft.PeftModel.from_pretrained(expected.model.get_submodule(root), lora.lora_path).eval()
    manager = worker.runner.lora_manager
    own = lora_layers(worker.runner.pipeline.model)
    params = request("r", lora_request=lora, need_kv_receive=False).sampling_params
    manager.activate(manager.resolve(params))
    changed = 0
    for name, part in own.items():
        layer = part.module
        assert layer is not None
        x = torch.randn(3, 2, layer.in_features, generator=torch.Generator().manual_seed(1))
        theirs = expected.model.get_submodule(name)(x)
        assert relative(layer(x), theirs) < 1e-6
        manager.activate(None)
        before = layer(x)
        manager.activate(manager.resolve(params))
        is_target = hasattr(expected.model.get_submodule(name), "lora_A")
        assert torch.equal(before, theirs) != is_target
        changed += is_target
    assert changed >= 4
    worker.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_image_is_that_of_peft(tmp_path: Path, dtype: str) -> None:
    """Bit for bit; in a bfloat16 model both compute with the adapter in float32."""
    lora = make(load().model, tmp_path, **CONFIGS["all layers"])
    expected = load(dtype)
    with_peft = peft.PeftModel.from_pretrained(expected.model, lora.lora_path)
    params = DenoiseParams(**{**vars(DenoiseParams.for_text_to_image()), "num_timesteps": STEPS})
    worker = started_worker(dtype)
    for scale in (1.0, 0.5):
        for layer in with_peft.modules():
            if hasattr(layer, "set_scale"):
                layer.set_scale("default", scale)
        generator = torch.Generator().manual_seed(0)
        theirs = expected.generate("a fox", params, generator=generator, image_shape=SHAPE)
        one = request("r", need_kv_receive=False, lora_request=lora, lora_scale=scale)
        output = worker.execute_model([one]).runner_outputs[0].result.result()[0]
        assert torch.equal(output, theirs)
    worker.shutdown()
