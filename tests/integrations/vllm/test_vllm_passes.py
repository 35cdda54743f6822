"""How often, when and in which forward pass vLLM reports a layer: what is sent is what it ended as.

vLLM's scheduler and both halves of the connector; each layer of a pass checks that the tokens that
it sees are in its blocks, those of a draft model included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from support.vllm.cache_layers import BLOCK, full
from support.vllm.engine_process import prompt
from support.vllm.halves import saver_of
from support.vllm.steps import SteppedEngine

TOKENS = prompt(3 * BLOCK + 7, seed=3)
GROUPS = (full("layer 0", "layer 1", "mtp 0"),)

Open = Callable[..., SteppedEngine]


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("batch", [512, 50])
def test_a_draft_model_computes_its_layers_repeatedly(
    engine: Open, drafts: int, load: str, batch: int
) -> None:
    """In a whole prefill and in chunks; decoded on, so that all of its layers are read."""
    steps = {"groups": GROUPS, "drafts": drafts, "batch": batch}
    producer, consumer = engine("producer", steps=steps), engine("consumer", load=load, steps=steps)
    for name in ("first", "second"):
        consumer.add(name, TOKENS, producer.prefill(name, TOKENS), tokens=4)
        assert consumer.run(name) == ["length"]
        consumer.settle()
        producer.settle()
        consumer.scheduler.reset_prefix_cache()
    assert (producer.counts["sent"], consumer.counts["received"]) == (2, 2)
    assert producer.counts.get("send_failed", 0) == 0
    assert (consumer.used_blocks, producer.used_blocks) == (0, 0)


def test_layers_are_copied_while_the_model_computes(
    engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the model itself, each once; those of its draft model when the pass has ended."""
    steps = {"groups": GROUPS, "drafts": 2}
    producer, early = engine("producer", steps=steps), list[set[int]]()
    saver = saver_of(producer.worker)
    commit = saver.commit

    def note_and_commit() -> None:
        # Which layers were copied before the pass has ended: vLLM is told of none.
        early.append({*saver._queued})
        commit()

    monkeypatch.setattr(saver, "commit", note_and_commit)
    producer.prefill("r", TOKENS)
    assert early[-1] == {0, 1}


def test_a_layer_that_the_model_computes_twice(
    engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first copy may be a wrong one: that cache fails and says so, the next ones are right."""
    producer, consumer = engine("producer"), engine("consumer")
    producer.ranks[0].passes_of_layer = 2
    consumer.add("first", TOKENS, producer.prefill("first", TOKENS))
    assert consumer.run("first") == ["error"]
    assert "its layer layer 0 was computed again after it was copied" in caplog.text
    for name in ("second", "third"):
        consumer.add(name, TOKENS, producer.prefill(name, TOKENS))
        assert consumer.run(name) == ["length"]
        consumer.settle()
        consumer.scheduler.reset_prefix_cache()
    assert consumer.counts["received"] == 2


@pytest.mark.parametrize("drafts", [0, 2])
def test_what_was_not_loaded_is_not_sent_on(engine: Open, drafts: int) -> None:
    """A load of the pass itself fails; with a draft model, vLLM asks before the pass ends."""
    steps = {"groups": GROUPS, "drafts": drafts}
    relay = engine("both", peers=["shm://nobody"], load="sync", timeout=0.2, steps=steps)
    reader = engine("consumer", steps=steps)
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": True}
    relay.add("r", TOKENS, {**params, "remote_url": "shm://nobody"})
    assert relay.run("r") == ["error"]
    reader.add("r", TOKENS, {"do_remote_prefill": True, "transfer_id": "r"})
    assert reader.run("r") == ["error"]
    assert reader.counts.get("received", 0) == 0


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_stage_that_drafts_nothing(engine: Open, load: str) -> None:
    """VLLM does not tell it that a pass has ended: the next step does."""
    steps = {"groups": GROUPS, "drafts": 2, "pipeline": 2}
    producer, consumer = engine("producer", steps=steps), engine("consumer", load=load, steps=steps)
    for name in ("first", "second"):
        consumer.add(name, TOKENS, producer.prefill(name, TOKENS), tokens=3)
        producer.step()
        assert consumer.run(name) == ["length"]
        consumer.settle()
        producer.settle()
        consumer.scheduler.reset_prefix_cache()
    assert (producer.counts["sent"], consumer.counts["received"]) == (4, 4)
