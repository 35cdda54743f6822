"""Names and shapes of the published BAGEL-7B-MoT, without its 29 GB of weights.

The tables follow from the published configuration. That `ema.safetensors` has 426 tensors of the
image encoder is from a public list of its names (ByteDance-Seed/Bagel, issue 90), and so are their
names; the file itself was not read.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.cli.commands import run
from omni_kvlink.errors import MissingFileError, SchemaError
from omni_kvlink.models.bagel import BagelConfig, CheckpointError, check_checkpoint
from omni_kvlink.models.bagel.model import BagelModel
from omni_kvlink.models.bagel.vae import Autoencoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

HIDDEN, INNER, LAYERS, VOCABULARY = 3584, 18944, 28, 152064
HEAD, KV = 128, 4 * 128
VIT, VIT_INNER, VIT_LAYERS = 1152, 4304, 26
Shapes = dict[str, tuple[int, ...]]

CONFIGS: dict[str, dict[str, Any]] = {
    "config": {"model_type": "bagel", "max_latent_size": 64, "latent_patch_size": 2},
    "llm_config": {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
    },
    "vit_config": {
        "hidden_size": VIT,
        "intermediate_size": VIT_INNER,
        "num_hidden_layers": VIT_LAYERS + 1,
        "num_attention_heads": 16,
        "image_size": 980,
        "patch_size": 14,
    },
}


def linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def language_shapes() -> Shapes:
    shapes: Shapes = {
        "language_model.model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "language_model.lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for expert in ("", "_moe_gen"):
        shapes[f"language_model.model.norm{expert}.weight"] = (HIDDEN,)
        for number in range(LAYERS):
            layer = f"language_model.model.layers.{number}"
            shapes |= linear(f"{layer}.self_attn.q_proj{expert}", HIDDEN, HIDDEN)
            shapes |= linear(f"{layer}.self_attn.k_proj{expert}", KV, HIDDEN)
            shapes |= linear(f"{layer}.self_attn.v_proj{expert}", KV, HIDDEN)
            shapes |= {
                f"{layer}.self_attn.o_proj{expert}.weight": (HIDDEN, HIDDEN),
                f"{layer}.self_attn.q_norm{expert}.weight": (HEAD,),
                f"{layer}.self_attn.k_norm{expert}.weight": (HEAD,),
                f"{layer}.mlp{expert}.gate_proj.weight": (INNER, HIDDEN),
                f"{layer}.mlp{expert}.up_proj.weight": (INNER, HIDDEN),
                f"{layer}.mlp{expert}.down_proj.weight": (HIDDEN, INNER),
                f"{layer}.input_layernorm{expert}.weight": (HIDDEN,),
                f"{layer}.post_attention_layernorm{expert}.weight": (HIDDEN,),
            }
    return shapes


def vision_shapes() -> Shapes:
    vit = "vit_model.vision_model"
    shapes = linear(f"{vit}.embeddings.patch_embedding", VIT, 14 * 14 * 3)
    shapes[f"{vit}.embeddings.position_embedding.weight"] = (70 * 70, VIT)
    shapes |= norm(f"{vit}.post_layernorm", VIT)
    for number in range(VIT_LAYERS):
        layer = f"{vit}.encoder.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{layer}.self_attn.{name}", VIT, VIT)
        shapes |= linear(f"{layer}.mlp.fc1", VIT_INNER, VIT)
        shapes |= linear(f"{layer}.mlp.fc2", VIT, VIT_INNER)
        shapes |= norm(f"{layer}.layer_norm1", VIT) | norm(f"{layer}.layer_norm2", VIT)
    shapes |= linear("connector.fc1", HIDDEN, VIT) | linear("connector.fc2", HIDDEN, HIDDEN)
    return shapes | {"vit_pos_embed.pos_embed": (70 * 70, HIDDEN)}


def model_shapes() -> Shapes:
    """Of `ema.safetensors`."""
    shapes = language_shapes() | vision_shapes()
    shapes |= linear("time_embedder.mlp.0", HIDDEN, 256) | linear(
        "time_embedder.mlp.2", HIDDEN, HIDDEN
    )
    shapes |= linear("vae2llm", HIDDEN, 2 * 2 * 16) | linear("llm2vae", 2 * 2 * 16, HIDDEN)
    return shapes | {"latent_pos_embed.pos_embed": (64 * 64, HIDDEN)}


def conv(name: str, outputs: int, inputs: int, kernel: int = 3) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, kernel, kernel), f"{name}.bias": (outputs,)}


def res_block(name: str, inputs: int, outputs: int) -> Shapes:
    shapes = norm(f"{name}.norm1", inputs) | conv(f"{name}.conv1", outputs, inputs)
    shapes |= norm(f"{name}.norm2", outputs) | conv(f"{name}.conv2", outputs, outputs)
    if inputs == outputs:
        return shapes
    return shapes | conv(f"{name}.nin_shortcut", outputs, inputs, 1)


def autoencoder_shapes() -> Shapes:
    """Of `ae.safetensors`: FLUX's autoencoder."""
    shapes: Shapes = {}
    for side in ("encoder", "decoder"):
        shapes |= res_block(f"{side}.mid.block_1", 512, 512)
        shapes |= res_block(f"{side}.mid.block_2", 512, 512) | norm(f"{side}.mid.attn_1.norm", 512)
        for name in ("q", "k", "v", "proj_out"):
            shapes |= conv(f"{side}.mid.attn_1.{name}", 512, 512, 1)
    shapes |= conv("encoder.conv_in", 128, 3) | norm("encoder.norm_out", 512)
    shapes |= conv("encoder.conv_out", 2 * 16, 512)
    shapes |= conv("decoder.conv_in", 512, 16) | norm("decoder.norm_out", 128)
    shapes |= conv("decoder.conv_out", 3, 128)
    widths = [128, 256, 512, 512]
    for level, (width, before) in enumerate(zip(widths, [128, *widths], strict=False)):
        for block in range(2):
            shapes |= res_block(
                f"encoder.down.{level}.block.{block}", width if block else before, width
            )
        if level < 3:
            shapes |= conv(f"encoder.down.{level}.downsample.conv", width, width)
        deeper = widths[min(level + 1, 3)]
        for block in range(3):
            shapes |= res_block(
                f"decoder.up.{level}.block.{block}", width if block else deeper, width
            )
        if level:
            shapes |= conv(f"decoder.up.{level}.upsample.conv", width, width)
    return shapes


def write_configs(directory: Path) -> None:
    for name, fields in CONFIGS.items():
        (directory / f"{name}.json").write_text(json.dumps(fields))


def write_header(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """A file of full length that is a hole behind its header."""
    size, at, entries = {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype], 0, {}
    for name, shape in shapes.items():
        stop = at + size * int(torch.Size(shape).numel())
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, stop)}
        at = stop
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + at)


@pytest.fixture
def published(tmp_path: Path, checkpoint: Path) -> Path:
    """The published checkpoint, but for what its tensors contain."""
    write_configs(tmp_path)
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    write_header(tmp_path / "ema.safetensors", model_shapes(), "BF16")
    write_header(tmp_path / "ae.safetensors", autoencoder_shapes(), "F32")
    return tmp_path


def test_the_networks_have_the_published_names_and_shapes(tmp_path: Path) -> None:
    write_configs(tmp_path)
    config = BagelConfig.load(tmp_path)
    with torch.device("meta"):
        networks = (
            BagelModel(config, "all"),
            Autoencoder(config.ae, encoder=True, decoder=True),
        )
    for network, expected in zip(networks, (model_shapes(), autoencoder_shapes()), strict=True):
        built = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        assert built == expected
    assert len(vision_shapes()) == 426
    assert sum(torch.Size(shape).numel() for shape in model_shapes().values()) == 14_607_260_128


def test_a_complete_checkpoint(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check_checkpoint(published)
    assert (report.errors, report.unread, report.tensors) == ([], [], 1223 + 244)
    assert report.nbytes == 2 * 14_607_260_128 + 4 * 83_819_683
    assert run(["check-checkpoint", str(published)]) == 0
    assert capsys.readouterr().out == "1467 tensors, 29.5 GB: complete\n"


LAST = "language_model.model.layers.27.self_attn.k_norm_moe_gen.weight"


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda shapes: shapes.pop(LAST), [f"ema.safetensors: 1 missing: {LAST}"]),
        (
            lambda shapes: shapes.update({LAST: (64,), "vae2llm.weight": (64, 3584)}),
            [
                f"ema.safetensors: {LAST} has shape (64,), wanted (128,)",
                "ema.safetensors: vae2llm.weight has shape (64, 3584), wanted (3584, 64)",
            ],
        ),
        (
            lambda shapes: shapes.update(odd=(2,), extra=(3,)),
            ["ema.safetensors: extra: nothing reads it", "ema.safetensors: odd: nothing reads it"],
        ),
    ],
)
def test_every_tensor_that_does_not_fit_is_named(
    published: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Shapes], Any],
    lines: list[str],
) -> None:
    shapes = model_shapes()
    change(shapes)
    write_header(published / "ema.safetensors", shapes, "BF16")
    report = check_checkpoint(published)
    unread = [f"{line}: nothing reads it" for line in report.unread]
    assert report.errors + unread == lines
    assert run(["check-checkpoint", str(published)]) == (1 if report.errors else 0)
    assert capsys.readouterr().out.splitlines()[: len(lines)] == lines


def test_a_dtype_that_needs_scales_is_an_error(published: Path) -> None:
    write_header(published / "ae.safetensors", autoencoder_shapes(), "F8_E4M3")
    errors = check_checkpoint(published).errors
    assert len(errors) == 244
    assert "decoder.conv_in.bias has dtype F8_E4M3; there are F32, F16, BF16" in errors[0]


def test_the_directory_is_looked_at_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for wrong, why in ((tmp_path / "nowhere", "does not exist"), (file, "is no directory")):
        with pytest.raises(MissingFileError, match=f"{wrong} {why}: give the directory of"):
            check_checkpoint(wrong)
        with pytest.raises(SystemExit, match="2"):
            run(["check-checkpoint", str(wrong)])
        shown = capsys.readouterr().err
        assert f"argument DIRECTORY: wanted a directory, got '{wrong}'" in shown
    (tmp_path / "config.json").write_text("{}")
    assert run(["check-checkpoint", str(tmp_path)]) == 2
    shown, missing = capsys.readouterr().err, "llm_config.json, vit_config.json, tokenizer.json"
    assert f"{tmp_path} lacks {missing}, ema.safetensors, ae.safetensors: fetch it" in shown


def test_files_that_are_not_whole(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = published / "ema.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"its header requires 29,214,\d+,\d+: fetch it"):
        check_checkpoint(published)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"ema\.safetensors is no safetensors file"):
        check_checkpoint(published)
    path.unlink()
    assert run(["check-checkpoint", str(published)]) == 2
    assert f"{published} lacks ema.safetensors: fetch it: hf download" in capsys.readouterr().err
    path.write_bytes(b"\xff" * 64)
    (published / "llm_config.json").write_text("{}")
    with pytest.raises(SchemaError, match=r"llm_config\.json"):
        check_checkpoint(published)
