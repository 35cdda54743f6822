"""Adapters, hidden states and streams together with steps, prefix caches and other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import SchemaError
from omni_kvlink.engine import (
    AREngine,
    DiffusionEngine,
    KVTransferConfig,
    LoRAConfig,
    OmniARConfig,
    OmniDiffusionConfig,
)
from support.engine.ar_stage import prompt
from support.engine.fixtures import STEPS, WAIT, checkpoint, close_to, request
from support.engine.lora_adapters import bagel_adapter

if TYPE_CHECKING:
    from pathlib import Path

TEXT: dict[str, Any] = {"modalities": ("text",), "max_tokens": 12}
QUESTION = "two owls in the rain, and what they may be waiting for"


def one_stage(**fields: Any) -> DiffusionEngine:
    return DiffusionEngine(
        OmniDiffusionConfig(checkpoint(), stage="all", dtype="float32", max_num_seqs=2, **fields)
    )


def own(name: str, **fields: Any) -> Any:
    return request(name, need_kv_receive=False, **fields)


def images(engine: Any, *requests: Any) -> list[torch.Tensor]:
    return [output.result()[0] for output in engine.generate(requests, timeout=WAIT)]


def test_adapters_with_step_execution(tmp_path: Path) -> None:
    """Requests of one adapter share steps, and those of another one wait for their end."""
    lora = bagel_adapter(tmp_path)

    def requests() -> list[Any]:
        return [own("a", lora_request=lora), own("b", seed=1, lora_request=lora), own("c")]

    with one_stage() as engine:
        expected = images(engine, *requests())
    with one_stage(step_execution=True) as engine:
        found = images(engine, *requests())
    assert all(map(close_to, found, expected))
    assert not close_to(found[0], found[2])


def test_step_execution_writes_no_texts() -> None:
    with one_stage(step_execution=True) as engine:
        text, image = engine.generate([own("a", modalities=("text",)), own("b")], timeout=WAIT)
        with pytest.raises(SchemaError, match="a stage with step_execution writes no texts"):
            text.result()
        assert image.result().shape[0] == 1


def test_a_stream_of_a_request_that_joins_steps() -> None:
    with one_stage(step_execution=True) as engine:
        outputs = engine.generate([own("a", stream=True), own("b", seed=1)], timeout=WAIT)
        assert not any(output.error for output in outputs)
        found: list[Any] = list(engine.take_events().result(WAIT))
        while found[-1].done < found[-1].total:
            found += engine.take_events().result(WAIT)
    assert {event.request_id for event in found} == {"a"}
    steps = [event.done for event in found]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS - 1


def ar(**fields: Any) -> AREngine:
    how = {"dtype": "float32", "num_blocks": 256, "block_size": 4, **fields}
    return AREngine(OmniARConfig(checkpoint(), **how))


def test_an_adapter_shares_no_blocks_with_other_requests(tmp_path: Path) -> None:
    lora = bagel_adapter(tmp_path)
    with ar() as engine:
        (expected,) = engine.generate([prompt("a", QUESTION, lora_request=lora, **TEXT)])
    with ar(enable_prefix_caching=True) as engine:
        for name in "ab":
            (plain,) = engine.generate([prompt(name, QUESTION, **TEXT)])
        hits = engine.stats()["prefix_cache"]["hits"]
        assert hits > 0
        (found,) = engine.generate([prompt("c", QUESTION, lora_request=lora, **TEXT)])
        (again,) = engine.generate([prompt("d", QUESTION, **TEXT)])
        assert engine.stats()["prefix_cache"]["hits"] == 2 * hits
    assert found.token_ids == expected.token_ids != plain.token_ids == again.token_ids


def test_hidden_states_of_a_prompt_that_is_cached() -> None:
    """They are not kept with blocks: all of the prompt is computed for them."""
    with ar(enable_prefix_caching=True) as engine:
        whole, plain, again = (
            engine.generate([prompt(name, QUESTION, **TEXT, **how)])[0]
            for name, how in (
                ("a", {"return_hidden_states": "all"}),
                ("b", {}),
                ("c", {"return_hidden_states": "all"}),
            )
        )
    assert plain.hidden_states is None
    assert whole.hidden_states is not None
    assert again.hidden_states is not None
    assert torch.equal(whole.hidden_states, again.hidden_states)


def test_a_stage_with_kv_transfer_has_no_adapter_of_its_own() -> None:
    take = KVTransferConfig("kv_consumer", "shm://a", ("shm://b",))
    with pytest.raises(ValueError, match="kv_transfer with lora_path"):
        OmniARConfig("x", kv_transfer=take, lora_config=LoRAConfig(lora_path="adapter"))
