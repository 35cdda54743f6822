"""Adapters in PEFT's format: what is read, and what is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_kvlink import SchemaError
from omni_kvlink.engine import EngineError, LoRAConfig, LoRARequest, OmniDiffusionSamplingParams
from omni_kvlink.engine.lora.adapter import LoRATarget, LoRATargets
from omni_kvlink.engine.lora.adapter_files import read_adapter
from omni_kvlink.engine.lora.manager import LoRAManager
from support.engine.lora_adapters import make_matrices, write_adapter

SHAPES = {"layers.0.q_proj": (6, 8), "layers.10.q_proj": (6, 8), "layers.0.mlp.up": (5, 7)}
MOST = 64


def make(directory: Path, tensors: Any = None, **config: Any) -> str:
    own = make_matrices(SHAPES) if tensors is None else tensors
    return write_adapter(directory / "style-1", own, **config).lora_path


def test_matrices_and_scalings(tmp_path: Path) -> None:
    files = read_adapter(make(tmp_path), max_rank=MOST)
    assert set(files.layers) == set(SHAPES)
    saved = make_matrices(SHAPES)
    for name, layer in files.layers.items():
        assert torch.equal(layer.a, saved[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(layer.b, saved[f"base_model.model.{name}.lora_B.weight"])
        assert layer.scaling == 2.0
    half = {name: tensor.half() for name, tensor in saved.items()}
    files = read_adapter(make(tmp_path, half), max_rank=MOST)
    assert all(layer.a.dtype == torch.float32 for layer in files.layers.values())


def test_ranks_and_alphas_of_single_layers(tmp_path: Path) -> None:
    """A pattern is a regular expression for the end of a name; the first one wins."""
    ranks = {"layers.0.q_proj": 2, "layers.0.mlp.up": 3}
    path = make(
        tmp_path,
        make_matrices(SHAPES, ranks=ranks),
        rank_pattern={"0.q_proj": 2, "up": 3},
        alpha_pattern={r"layers\.\d.*q_proj": 6, "q_proj": 99},
        use_rslora=True,
    )
    with pytest.raises(SchemaError, match=r"layers\.0\.mlp\.up has rank 3, max_lora_rank is 2"):
        read_adapter(path, max_rank=2)
    found = {name: one.scaling for name, one in read_adapter(path, max_rank=4).layers.items()}
    assert found == {
        "layers.0.q_proj": 6 / math.sqrt(2),
        "layers.10.q_proj": 6 / 2,
        "layers.0.mlp.up": 8 / math.sqrt(3),
    }


def test_a_digest_is_of_what_the_files_do(tmp_path: Path) -> None:
    def digest(**config: Any) -> str:
        return read_adapter(make(tmp_path, **config), max_rank=MOST).digest

    first = digest()
    assert digest(lora_dropout=0.3, base_model_name_or_path="elsewhere") == first
    assert digest(lora_alpha=9) != first
    assert digest(tensors=make_matrices(SHAPES, seed=2)) != first


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["w"]}, "target_parameters"),
        ({"a_field_of_a_later_release": {"x": 1}}, "a_field_of_a_later_release"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": "4"}, "Expected `int`"),
        ({"r": 0}, "1 or more"),
        ({"rank_pattern": {"q_proj": 0}}, "1 or more"),
        ({"rank_pattern": {"(": 4}}, "pattern"),
        ({"r": 5}, "rank 5 by its config"),
    ],
)
def test_a_config_that_is_not_supported(tmp_path: Path, config: Any, word: str) -> None:
    with pytest.raises(SchemaError, match=word):
        read_adapter(make(tmp_path, **config), max_rank=MOST)


def changed(name: str, tensor: torch.Tensor | None, **more: torch.Tensor) -> Any:
    tensors = {**make_matrices({"q": (6, 8)}), **more}
    tensors.pop(f"base_model.model.q.{name}")
    return tensors if tensor is None else {**tensors, f"base_model.model.q.{name}": tensor}


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"step": torch.ones(1)}, "step: only lora_A.weight and lora_B.weight"),
        (changed("lora_A.weight", None), "q has lora_B alone"),
        (changed("lora_B.weight", torch.full((6, 4), torch.nan)), "NaN"),
        (changed("lora_B.weight", torch.ones(6, 4, 1, 1)), r"\(6, 4, 1, 1\), that of no linear"),
        (changed("lora_B.weight", torch.ones(6, 4, dtype=torch.float64)), "float64"),
        (changed("lora_B.weight", torch.ones(6, 3)), r"\(4, 8\) and \(6, 3\), and rank 4"),
        (
            changed(
                "lora_A.weight", torch.ones(4, 8), **{"q.lora_magnitude_vector": torch.ones(6)}
            ),
            "q.lora_magnitude_vector",
        ),
    ],
)
def test_tensors_that_are_not_supported(tmp_path: Path, tensors: Any, word: str) -> None:
    with pytest.raises(SchemaError, match=word):
        read_adapter(make(tmp_path, tensors), max_rank=MOST)


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nowhere: adapter_config\.json cannot be read"):
        read_adapter(str(tmp_path / "nowhere"), max_rank=MOST)
    path = Path(make(tmp_path))
    weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    whole = weights.read_bytes()
    for size in (0, 7, 40, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(SchemaError, match="damaged"):
            read_adapter(str(path), max_rank=MOST)
    weights.unlink()
    (path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(EngineError, match=r"adapter_model\.safetensors cannot be read"):
        read_adapter(str(path), max_rank=MOST)
    save_file({}, weights)
    with pytest.raises(SchemaError, match="no matrices"):
        read_adapter(str(path), max_rank=MOST)
    for text in (b"[]", b"{", b'{"r": 4}', b"\xff"):
        config.write_bytes(text)
        with pytest.raises(SchemaError, match=r"adapter_config\.json"):
            read_adapter(str(path), max_rank=MOST)


def manager(config: LoRAConfig, layer: torch.nn.Module | None = None) -> LoRAManager:
    target = LoRATarget(layer, (6, 8))
    targets = LoRATargets({"whole.q": target}, torch.device("cpu"), ("whole.",))
    return LoRAManager(config, lambda: targets)


def adapter(directory: Path, number: int, shape: tuple[int, int] = (6, 8)) -> LoRARequest:
    return write_adapter(directory / f"style-{number}", make_matrices({"q": shape}, seed=number))


def params(lora: LoRARequest, scale: float = 1.0) -> OmniDiffusionSamplingParams:
    return OmniDiffusionSamplingParams(lora_request=lora, lora_scale=scale)


def test_the_adapter_that_was_used_longest_ago_is_released(tmp_path: Path) -> None:
    held = manager(LoRAConfig(max_loras=2))
    one, two, three = (adapter(tmp_path, number) for number in (1, 2, 3))
    for lora in (one, two, one, three):
        held.resolve(params(lora))
    assert held.list_adapters() == [1, 3]
    assert held.pin_adapter(1)
    held.resolve(params(two))
    held.resolve(params(three))
    assert held.list_adapters() == [1, 3]


def test_what_is_released_acts_no_more(tmp_path: Path) -> None:
    layer, x = torch.nn.Linear(8, 6), torch.ones(2, 8)
    before = layer(x)
    held = manager(LoRAConfig(), layer)
    held.activate(held.resolve(params(adapter(tmp_path, 1), 0.5)))
    tensors = load_file(tmp_path / "style-1" / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.q.lora_{which}.weight"] for which in "AB")
    torch.testing.assert_close(layer(x), before + (x @ a.T) @ b.T)
    held.add_adapter(adapter(tmp_path, 2))
    assert torch.equal(layer(x), before)
    assert held.active is None


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        (make_matrices({"k": (6, 8), "q": (6, 8)}), "1 layers that are no linear layers.*: k"),
        (make_matrices({"q": (8, 6)}), "q has 8 outputs and 6 inputs, the model's layer 6 and 8"),
        (make_matrices({"q": (6, 8), "whole.q": (6, 8)}), "which are one"),
    ],
)
def test_an_adapter_of_another_model(tmp_path: Path, tensors: Any, word: str) -> None:
    lora = write_adapter(tmp_path / "style-1", tensors)
    held = manager(LoRAConfig())
    with pytest.raises(SchemaError, match=word):
        held.add_adapter(lora)
    assert held.list_adapters() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"lora_name": ""},
        {"lora_int_id": 0},
        {"lora_int_id": True},
        {"lora_path": ""},
    ],
)
def test_a_request_says_which_adapter(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"lora_name": "a", "lora_int_id": 1, "lora_path": "b"}
    assert OmniDiffusionSamplingParams(lora_request=LoRARequest(**right)).lora_int_id == 1
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LoRARequest(**{**right, **wrong})
    with pytest.raises(ValueError, match="a LoRARequest"):
        OmniDiffusionSamplingParams(lora_request=right)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lora_int_id 2: the lora_request has 1"):
        OmniDiffusionSamplingParams(lora_request=LoRARequest(**right), lora_int_id=2)


def test_an_adapter_that_was_loaded_twice_is_one(tmp_path: Path) -> None:
    """A rank that had to load it again forms the same groups of requests as the others."""
    layer, one = torch.nn.Linear(8, 6), adapter(tmp_path, 1)
    held = manager(LoRAConfig(), layer)
    first = held.resolve(params(one))
    held.add_adapter(adapter(tmp_path, 2))
    second = held.resolve(params(one))
    assert first is not None
    assert second is not None
    assert first.adapter is not second.adapter
    assert len({first, second}) == 1
    assert first != held.resolve(params(one, 0.5))
    held.activate(first)
    assert held.remove_adapter(1)
    assert held.active is None
    (tmp_path / "style-1" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 1}'
    )
    assert held.resolve(params(one)) != first
