"""Reading and writing checkpoints: names, shapes, configuration, missing packages."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel import (
    BagelConfig,
    BagelPipeline,
    CheckpointError,
    TokenizerMissingError,
    make_tiny_checkpoint,
)
from support.processes.absent import check_untouched

if TYPE_CHECKING:
    from collections.abc import Callable

Tensors = dict[str, torch.Tensor]

# Of the published checkpoint, with `#` for a layer and `@` for nothing or an expert's suffix.
MODEL_NAMES = """
language_model.model.embed_tokens.weight language_model.model.norm@.weight
language_model.lm_head.weight connector.fc1.weight connector.fc1.bias connector.fc2.weight
connector.fc2.bias time_embedder.mlp.0.weight time_embedder.mlp.0.bias time_embedder.mlp.2.weight
time_embedder.mlp.2.bias vae2llm.weight vae2llm.bias llm2vae.weight llm2vae.bias
latent_pos_embed.pos_embed vit_pos_embed.pos_embed
"""
LAYER_NAMES = """
self_attn.q_proj@.weight self_attn.q_proj@.bias self_attn.k_proj@.weight self_attn.k_proj@.bias
self_attn.v_proj@.weight self_attn.v_proj@.bias self_attn.o_proj@.weight
self_attn.q_norm@.weight self_attn.k_norm@.weight mlp@.gate_proj.weight mlp@.up_proj.weight
mlp@.down_proj.weight input_layernorm@.weight post_attention_layernorm@.weight
"""
VIT_NAMES = """
embeddings.patch_embedding.weight embeddings.patch_embedding.bias
embeddings.position_embedding.weight post_layernorm.weight post_layernorm.bias
"""
VIT_LAYER_NAMES = """
self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj
layer_norm1 layer_norm2 mlp.fc1 mlp.fc2
"""


def _published_names() -> set[str]:
    names = MODEL_NAMES.split()
    names += [f"language_model.model.layers.#.{name}" for name in LAYER_NAMES.split()]
    both = {name.replace("@", expert) for name in names for expert in ("", "_moe_gen")}
    vit = "vit_model.vision_model."
    both |= {vit + name for name in VIT_NAMES.split()}
    layers = [f"{vit}encoder.layers.#.{name}." for name in VIT_LAYER_NAMES.split()]
    return both | {name + kind for name in layers for kind in ("weight", "bias")}


def _without_layers(names: list[str]) -> set[str]:
    parts = (name.split(".layers.") for name in names)
    return {f"{p[0]}.layers.#.{p[1].split('.', 1)[1]}" if p[1:] else p[0] for p in parts}


def test_model_names_are_the_published_ones(checkpoint: Path) -> None:
    names = list(load_file(checkpoint / "ema.safetensors"))
    assert _without_layers(names) == _published_names()
    vit = [name for name in names if "encoder.layers" in name and "layer_norm1.bias" in name]
    assert len(vit) == 2  # one less than vit_config.json names


def test_autoencoder_names_are_the_published_ones(checkpoint: Path) -> None:
    names = {name.rsplit(".", 1)[0] for name in load_file(checkpoint / "ae.safetensors")}
    res = ["norm1", "conv1", "norm2", "conv2"]
    blocks = [
        "encoder.down.0.block.0",
        "encoder.down.1.block.0",
        "decoder.up.0.block.0",
        "decoder.up.0.block.1",
        "decoder.up.1.block.0",
        "decoder.up.1.block.1",
    ]
    blocks += [
        f"{side}.mid.{block}" for side in ("encoder", "decoder") for block in ("block_1", "block_2")
    ]
    expected = {f"{block}.{part}" for block in blocks for part in res}
    for side in ("encoder", "decoder"):
        expected |= {f"{side}.{part}" for part in ("conv_in", "norm_out", "conv_out")}
        expected |= {f"{side}.mid.attn_1.{part}" for part in ("norm", "q", "k", "v", "proj_out")}
    expected |= {"encoder.down.0.downsample.conv", "decoder.up.1.upsample.conv"}
    expected |= {"encoder.down.1.block.0.nin_shortcut", "decoder.up.0.block.0.nin_shortcut"}
    assert names == expected


def test_published_sizes_are_the_defaults(tmp_path: Path) -> None:
    llm = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "model_type": "qwen2",
    }
    vit = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 980,
        "patch_size": 14,
    }
    for name, fields in (("config", {}), ("llm_config", llm), ("vit_config", vit)):
        (tmp_path / f"{name}.json").write_text(json.dumps(fields))
    config = BagelConfig.load(tmp_path)
    assert (config.llm.head_dim, config.llm.rope_theta, config.llm.qk_norm) == (128, 1e6, True)
    assert (config.vit.layers_used, config.vit_max_num_patch_per_side) == (26, 70)
    assert (config.latent_stride, config.patch_dim, config.max_latent_size) == (16, 64, 64)
    assert (config.ae.scale_factor, config.ae.shift_factor) == (0.3611, 0.1159)


def test_a_seed_determines_the_bytes(checkpoint: Path, tmp_path: Path) -> None:
    again = make_tiny_checkpoint(tmp_path / "again")
    other = make_tiny_checkpoint(tmp_path / "other", seed=1)
    for file in sorted(path.name for path in checkpoint.iterdir()):
        same = (again / file).read_bytes() == (checkpoint / file).read_bytes()
        assert same, file
    weights = (other / "ema.safetensors").read_bytes()
    assert weights != (checkpoint / "ema.safetensors").read_bytes()


def test_weights_are_loaded_in_the_given_dtype(exact: BagelPipeline, short: BagelPipeline) -> None:
    for pipeline in (exact, short):
        assert {t.dtype for t in pipeline.model.state_dict().values()} == {pipeline.dtype}
        assert {t.dtype for t in pipeline.autoencoder.state_dict().values()} == {torch.float32}
        assert not any(p.requires_grad for p in pipeline.model.parameters())
        assert not pipeline.model.training


def _spoiled(checkpoint: Path, tmp_path: Path, file: str, spoil: Callable[[Tensors], Any]) -> Path:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    tensors = load_file(copy / file)
    spoil(tensors)
    save_file(tensors, copy / file)
    return copy


NORM = "language_model.model.layers.1.self_attn.k_norm.weight"


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("ema", lambda t: t.pop(NORM), f"ema.safetensors: 1 missing: {NORM}"),
        (
            "ema",
            lambda t: t.update({NORM: t[NORM].int()}),
            "k_norm.weight has dtype I32; there are F",
        ),
        ("ema", lambda t: t.update({NORM: t[NORM][:8].clone()}), r"shape \(8,\), wanted \(16,\)"),
        ("ae", lambda t: t.pop("decoder.conv_in.bias"), "ae.safetensors: 1 missing: decoder.conv"),
        ("ema", lambda t: t.update({"vit_pos_embed.pos_embed": torch.ones(60, 64)}), "no square"),
    ],
)
def test_a_wrong_checkpoint_is_named_before_anything_is_read(
    checkpoint: Path, tmp_path: Path, file: str, spoil: Callable[[Tensors], Any], message: str
) -> None:
    copy = _spoiled(checkpoint, tmp_path, f"{file}.safetensors", spoil)
    with pytest.raises(CheckpointError, match=message):
        BagelPipeline.from_pretrained(copy)
    assert issubclass(CheckpointError, SchemaError)


@pytest.mark.parametrize("stage", ["all", "ar", "dit"])
def test_tensors_that_nothing_reads_are_logged(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: Any
) -> None:
    """In one line for a file; what another stage reads is not in it."""
    BagelPipeline.from_pretrained(checkpoint, stage=stage)
    assert caplog.messages == []
    more = {name: torch.ones(1) for name in ("odd.weight", "lm_head.scale")}
    copy = _spoiled(checkpoint, tmp_path, "ema.safetensors", lambda t: t.update(more))
    BagelPipeline.from_pretrained(copy, stage=stage)
    (line,) = caplog.messages
    assert "ema.safetensors: nothing reads 2 of its tensors: lm_head.scale, odd.weight" in line


@pytest.mark.parametrize(
    ("file", "name", "stage", "needed"),
    [
        ("ema", "connector.fc1.bias", "dit", False),
        ("ema", "connector.fc1.bias", "ar", True),
        ("ema", "language_model.lm_head.weight", "dit", False),
        ("ema", "language_model.lm_head.weight", "ar", True),
        ("ema", "vit_model.vision_model.post_layernorm.bias", "dit", False),
        ("ema", "llm2vae.bias", "ar", False),
        ("ema", "llm2vae.bias", "dit", True),
        ("ema", "language_model.model.layers.0.mlp.up_proj.weight", "dit", True),
        ("ae", "encoder.conv_in.bias", "dit", False),
        ("ae", "encoder.conv_in.bias", "ar", True),
        ("ae", "decoder.conv_in.bias", "ar", False),
        ("ae", "decoder.conv_in.bias", "dit", True),
    ],
)
def test_a_stage_needs_only_its_own_tensors(
    checkpoint: Path, tmp_path: Path, file: str, name: str, stage: Any, needed: bool
) -> None:
    copy = _spoiled(checkpoint, tmp_path, f"{file}.safetensors", lambda t: t.pop(name))
    if needed:
        with pytest.raises(CheckpointError, match=f"1 missing: {name}"):
            BagelPipeline.from_pretrained(copy, stage=stage)
    else:
        BagelPipeline.from_pretrained(copy, stage=stage)


def test_position_tables_have_the_size_of_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    fields = json.loads((copy / "config.json").read_text())
    fields |= {"max_latent_size": 7, "vit_max_num_patch_per_side": 9}
    (copy / "config.json").write_text(json.dumps(fields))
    config = BagelPipeline.from_pretrained(copy).config
    assert (config.max_latent_size, config.vit_max_num_patch_per_side) == (16, 8)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("llm_config", {"hidden_size": None}, "llm_config.json: .*hidden_size"),
        ("llm_config", {"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ("llm_config", {"rope_scaling": {"type": "yarn"}}, "rope_scaling .* not supported"),
        ("llm_config", {"layer_module": "Qwen2MoEDecoderLayer"}, "layer_module .* not supported"),
        ("vit_config", {"num_hidden_layers": 1}, "num_hidden_layers must be 2 or more"),
        ("vit_config", {"patch_size": 0}, "patch_size must be positive"),
        ("ae_config", {"ch": 48}, "ch must be a multiple of 32"),
        ("config", {"interpolate_pos": True}, "config.json: interpolate_pos True is not supported"),
        ("config", {"connector_act": "relu"}, "connector_act 'relu' is not supported"),
    ],
)
def test_an_unsupported_configuration_is_named(
    checkpoint: Path, tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    path = copy / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SchemaError, match=message):
        BagelPipeline.from_pretrained(copy)


def test_files_that_are_missing_or_broken_are_named(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (copy / "ae.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"ae\.safetensors is no safetensors file"):
        BagelPipeline.from_pretrained(copy)
    (copy / "vit_config.json").write_text("{")
    with pytest.raises(SchemaError, match=r"vit_config\.json: "):
        BagelPipeline.from_pretrained(copy)
    shutil.copy(checkpoint / "vit_config.json", copy)
    for file in ("ema.safetensors", "llm_config.json"):
        (copy / file).unlink()
        with pytest.raises(FileNotFoundError, match=file):
            BagelPipeline.from_pretrained(copy)


def test_special_tokens_come_from_the_tokenizer_file(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    path = copy / "tokenizer.json"
    path.write_text(path.read_text().replace("<|vision_end|>", "<|elsewhere|>"))
    with pytest.raises(SchemaError, match=r"no special token <\|vision_end\|>"):
        BagelPipeline.from_pretrained(copy)


def test_a_tokenizer_that_vanished_is_named(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    pipeline = BagelPipeline.from_pretrained(copy)
    missing = pytest.raises(
        TokenizerMissingError, match=r"no .*tokenizer\.json: .* Restore it from the checkpoint"
    )
    (copy / "tokenizer.json").unlink()
    with missing:
        pipeline.prefill("a fox")
    with missing:
        BagelPipeline.from_pretrained(copy)
    shutil.rmtree(copy)
    with missing:
        pipeline.count_tokens("a fox")
    shutil.copytree(checkpoint, copy)
    assert pipeline.prefill("a fox").gen.kv_lens[0] == pipeline.count_tokens("a fox")["gen"]


def test_a_tokenizer_that_cannot_be_read_is_named(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    path = copy / "tokenizer.json"
    path.write_text(json.dumps({"added_tokens": json.loads(path.read_text())["added_tokens"]}))
    pipeline = BagelPipeline.from_pretrained(copy)
    with pytest.raises(SchemaError, match=r"tokenizer\.json: "):
        pipeline.prefill("a fox")


def test_the_wrong_dtype_or_stage_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.float64; there are torch\.bf"):
        BagelPipeline.from_pretrained(checkpoint, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"vae_dtype torch\.int8; there are torch\.b"):
        BagelPipeline.from_pretrained(checkpoint, vae_dtype=torch.int8)
    with pytest.raises(ValueError, match="stage is one of"):
        BagelPipeline.from_pretrained(checkpoint, stage="vae")  # type: ignore[arg-type]


def test_missing_packages_are_named_when_they_are_needed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    pipeline = BagelPipeline.from_pretrained(checkpoint)
    context = pipeline.append_text(pipeline.empty_context(), [pipeline.special_tokens.bos])
    with pytest.raises(ImportError, match=r"pip install 'omni_kvlink\[bagel\]'"):
        pipeline.prefill("a fox")
    with pytest.raises(ImportError, match=r"pip install 'omni_kvlink\[bagel\]'"):
        pipeline.prefill(torch.zeros(8, 8, 3, dtype=torch.uint8))
    with pytest.raises(ImportError, match=r"pip install 'omni_kvlink\[bagel\]'"):
        make_tiny_checkpoint(checkpoint)
    assert pipeline.append_vit_image(context, torch.zeros(3, 16, 16)).kv_lens == [7]


def test_without_safetensors_the_cure_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_untouched("omni_kvlink.models.bagel", "safetensors")
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"needs safetensors: pip install .*\[bagel\]"):
        BagelPipeline.from_pretrained(checkpoint)
    with pytest.raises(ImportError, match=r"needs safetensors: pip install .*\[bagel\]"):
        make_tiny_checkpoint(tmp_path)
