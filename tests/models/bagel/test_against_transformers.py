"""The same weights in Hugging Face's models: skipped where transformers is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink.adapters import make_cache

from .conftest import stored

if TYPE_CHECKING:
    from omni_kvlink.models.bagel import BagelPipeline

transformers = pytest.importorskip("transformers")


def _renamed(pipeline: BagelPipeline, prefix: str) -> dict[str, torch.Tensor]:
    weights = pipeline.model.state_dict()
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix) and "_moe_gen" not in name
    }


def test_the_und_expert_is_a_qwen3_with_biases(exact: BagelPipeline) -> None:
    """Qwen3 is Qwen2 with a norm on q and k; the output projection's bias is set to zero."""
    if not hasattr(transformers, "Qwen3Config"):
        pytest.skip("this transformers has no Qwen3")
    llm = exact.config.llm
    config = transformers.Qwen3Config(
        vocab_size=llm.vocab_size,
        hidden_size=llm.hidden_size,
        intermediate_size=llm.intermediate_size,
        num_hidden_layers=llm.num_hidden_layers,
        num_attention_heads=llm.num_attention_heads,
        num_key_value_heads=llm.num_key_value_heads,
        head_dim=llm.head_dim,
        rms_norm_eps=llm.rms_norm_eps,
        rope_theta=llm.rope_theta,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    weights = _renamed(exact, "language_model.")
    for i in range(llm.num_hidden_layers):
        weights[f"model.layers.{i}.self_attn.o_proj.bias"] = torch.zeros(llm.hidden_size)
    model.load_state_dict(weights, strict=True)

    ids = exact.encode_prompt("a fox in the snow")
    context = exact.append_text(exact.append_text(exact.empty_context(), ids[:5]), ids[5:])
    cache = make_cache(config)
    with torch.no_grad():
        model(torch.tensor([ids]), None, None, cache)
        row = exact.model.embed([exact.special_tokens.bos])
        _, hidden = exact.model.extend(context, row, mode="und", causal=True)
        logits = exact.model.language_model.lm_head(hidden)[0]
        longer = model(torch.tensor([[*ids, exact.special_tokens.bos]])).logits[0, -1]
    assert torch.allclose(logits, longer, atol=1e-3)
    for i, layer in enumerate(cache.layers):
        keys, values = stored(context, i)
        assert torch.allclose(layer.keys[0].transpose(0, 1), keys, atol=1e-4)
        assert torch.allclose(layer.values[0].transpose(0, 1), values, atol=1e-4)


def test_the_vit_is_a_siglip_without_its_last_layer(exact: BagelPipeline) -> None:
    vit = exact.config.vit
    config = transformers.SiglipVisionConfig(
        hidden_size=vit.hidden_size,
        intermediate_size=vit.intermediate_size,
        num_hidden_layers=vit.layers_used,
        num_attention_heads=vit.num_attention_heads,
        image_size=vit.image_size,
        patch_size=vit.patch_size,
        vision_use_head=False,
    )
    model = transformers.SiglipVisionModel(config).eval()
    wanted_names = model.state_dict().keys()
    prefix = "" if "post_layernorm.weight" in wanted_names else "vision_model."
    weights = {
        prefix + name: tensor for name, tensor in _renamed(exact, "vit_model.vision_model.").items()
    }
    patch = f"{prefix}embeddings.patch_embedding.weight"
    size = vit.patch_size
    weights[patch] = weights[patch].view(-1, size, size, 3).permute(0, 3, 1, 2).contiguous()
    model.load_state_dict(weights, strict=True)

    pixels = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        expected = model(pixels[None]).last_hidden_state[0]
        got = exact.model.vit_model(pixels, exact.config.vit_max_num_patch_per_side)
    assert torch.allclose(got, expected, atol=1e-4)
