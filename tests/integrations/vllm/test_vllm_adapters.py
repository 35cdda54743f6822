"""A cache of an adapter (LoRA) is loaded where the adapter has the same weights, and only there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from vllm.lora.request import LoRARequest

from omni_kvlink import SchemaError
from omni_kvlink.integrations.vllm.adapters import AdapterIdentities
from omni_kvlink.integrations.vllm.identity import tower_adapter
from support.vllm.engine_process import BLOCK, prompt
from support.vllm.lora_adapters import make_adapter
from support.vllm.steps import SteppedEngine

TOKENS = prompt(2 * BLOCK + 7, seed=3)

Open = Callable[..., SteppedEngine]


def config(dtype: str = "torch.float32", modules: list[str] | None = None) -> Any:
    lora = SimpleNamespace(
        lora_dtype=dtype, target_modules=modules, enable_tower_connector_lora=True
    )
    return SimpleNamespace(lora_config=lora)


def identity(adapter: LoRARequest, names: Any = MappingProxyType({}), **options: Any) -> str:
    """In an engine that has just started."""
    return AdapterIdentities(names, config(**options)).identify(adapter)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return make_adapter(tmp_path / "sql", seed=1)


def test_the_same_weights_elsewhere(path: str, tmp_path: Path) -> None:
    """Under another path, number and name."""
    here = identity(LoRARequest("sql", 1, path))
    copied = str(shutil.copytree(path, tmp_path / "elsewhere"))
    assert identity(LoRARequest("other", 7, copied)) == here
    assert AdapterIdentities({}, config()).identify(None) == ""


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights": lambda folder: flip(folder / "adapter_model.safetensors", -1),
    "config": lambda folder: flip(folder / "adapter_config.json", 20),
    "form": lambda folder: (folder / "adapter_model.safetensors").rename(
        folder / "adapter_model.bin"
    ),
}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_under_the_same_name(path: str, tmp_path: Path, change: str) -> None:
    here = identity(LoRARequest("sql", 1, path))
    other = shutil.copytree(path, tmp_path / "other")
    CHANGES[change](other)
    assert identity(LoRARequest("sql", 1, str(other))) != here


def test_what_the_engine_makes_of_an_adapter(path: str) -> None:
    adapter = LoRARequest("sql", 1, path)
    variants: list[dict[str, Any]] = [
        {},
        {"dtype": "torch.bfloat16"},
        {"modules": ["q_proj"]},
        {"names": {"sql": "v1"}},
    ]
    assert len({identity(adapter, **variant) for variant in variants}) == len(variants)


def test_a_name_for_the_weights(path: str) -> None:
    """In place of the files, which need not be there; and never mistaken for a digest."""
    digest = identity(LoRARequest("sql", 1, path))
    named = identity(LoRARequest("sql", 1, "/nowhere"), {"sql": "v1", "other": "v2"})
    assert identity(LoRARequest("sql", 2, path), {"sql": "v1"}) == named
    assert named not in {identity(LoRARequest("sql", 1, path), {"sql": "v2"}), digest}


@pytest.mark.parametrize("names", [[], "sql", {"sql": ""}, {"sql": 1}, {1: "sql"}, {"": "v"}, None])
def test_names_that_are_none(engine: Open, names: Any) -> None:
    """The engine does not start."""
    with pytest.raises(SchemaError, match=r"adapters.*: wanted a (map|text)"):
        engine("producer", adapters=names)


def test_files_that_change(path: str) -> None:
    """VLLM may have loaded the ones or the others: neither is a known adapter."""
    identities, adapter = AdapterIdentities({}, config()), LoRARequest("sql", 1, path)
    first = identities.identify(adapter)
    assert identities.identify(adapter) == first
    flip(Path(path) / "adapter_model.safetensors", -1)
    with pytest.raises(SchemaError, match="have changed since they were first used"):
        identities.identify(adapter)
    assert identities.identify(LoRARequest("sql", 2, path)) != first, "loaded, with a new number"


def send(producer: SteppedEngine, name: str, adapter: LoRARequest) -> dict[str, Any]:
    return producer.prefill(name, TOKENS, inputs={"lora_request": adapter})


def test_only_the_same_weights_share_a_cache(
    engine: Open, path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = engine("producer"), engine("consumer")
    copied = str(shutil.copytree(path, tmp_path / "elsewhere"))
    other = make_adapter(tmp_path / "other", seed=2)
    cases = [("same", copied, "length"), ("other", other, "error")]
    for number, (name, there, reason) in enumerate(cases, 2):
        params = send(producer, name, LoRARequest("sql", 1, path))
        consumer.add(name, TOKENS, params, lora_request=LoRARequest("sql", number, there))
        assert consumer.run(name) == [reason]
    assert "from another prompt: other adapter" in caplog.text
    consumer.add("plain", TOKENS, send(producer, "plain", LoRARequest("sql", 1, path)))
    assert consumer.run("plain") == ["error"]
    for each in (consumer, producer):
        each.settle()
    assert (consumer.used_blocks, producer.used_blocks) == (0, 0)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_files_that_are_not_there(
    engine: Open, path: str, caplog: pytest.LogCaptureFixture, side: str
) -> None:
    """The request's own error, with the cure; other requests go on."""
    producer, consumer = engine("producer"), engine("consumer")
    absent = LoRARequest("sql", 1, "/nowhere")
    there = absent if side == "producer" else LoRARequest("sql", 1, path)
    producer.add("r", TOKENS, {"do_remote_decode": True}, lora_request=there)
    assert producer.run("r") == ["length"]
    params = {"do_remote_prefill": True, "transfer_id": "r"}
    consumer.add("r", TOKENS, params, lora_request=LoRARequest("sql", 1, path))
    if side == "consumer":
        consumer.add("s", TOKENS, params, lora_request=absent)
        assert consumer.run("s") == ["error"]
    producer.settle()
    assert consumer.run("r") == ["error" if side == "producer" else "length"]
    assert "the files of the adapter 'sql' at '/nowhere' cannot be read" in caplog.text
    assert 'in the setting adapters, as {"sql": "…"}, equal on both sides' in caplog.text


def test_the_encoders_adapter(path: str) -> None:
    """It counts where the encoder runs with it, by the same identity."""
    adapter: Any = SimpleNamespace(lora_request=LoRARequest("sql", 1, path))
    lora = config()
    identities = AdapterIdentities({}, lora)
    assert tower_adapter(adapter, lora, identities) == identities.identify(adapter.lora_request)
    lora.lora_config.enable_tower_connector_lora = False
    assert tower_adapter(adapter, lora, identities) == ""


@pytest.mark.timeout(900)
def test_two_servers_that_loaded_their_adapters_differently(start: Any, directory: Path) -> None:
    """With a model: in another order and from other paths; each adapter's tokens are its own."""
    seeds = {"sql": 1, "chat": 2}
    paths = {
        side: {name: make_adapter(directory / side / name, seed) for name, seed in seeds.items()}
        for side in ("there", "here")
    }
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    producer, consumer = start("p", "producer", **options), start("d", "consumer", **options)
    for number, name in enumerate(seeds, 1):
        mine = {"adapter": [name, 3 - number, paths["here"][name]]}
        expected = consumer.generate(TOKENS, **mine)
        assert consumer.call("forget")
        theirs = {"adapter": [name, number, paths["there"][name]]}
        got = consumer.generate(TOKENS, producer.prefill(TOKENS, inputs=theirs), **mine)
        assert (got["cached"], got["tokens"]) == (len(TOKENS), expected["tokens"])
        assert consumer.call("forget")
    assert consumer.count("received") == 2
    other = {"adapter": ["sql", 3, paths["here"]["chat"]]}
    theirs = {"adapter": ["sql", 1, paths["there"]["sql"]]}
    got = consumer.generate(TOKENS, producer.prefill(TOKENS, inputs=theirs), **other)
    assert got["reason"] == "error"
    assert consumer.count("received") == 2
