"""Schedulers: order, batches, waiting for a full batch, aborts; without a model."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch

from omni_kvlink import CapacityError, TransferFailed
from omni_kvlink.engine import (
    ModelRunnerOutput,
    OmniARConfig,
    OmniARScheduler,
    OmniDiffusionConfig,
    SyncScheduler,
)
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineError, RequestAborted
from omni_kvlink.engine.kv.kv_state import KVState
from omni_kvlink.engine.lora.request import LoRARequest
from omni_kvlink.engine.outputs import ARSchedulerOutput, DiffusionOutput
from omni_kvlink.engine.sched import scheduler as scheduler_module
from support.engine.fixtures import request


class FakeKVManager:
    """A KV manager whose receives end when the test calls `come`."""

    def __init__(self, capacity: int = 1000):
        self.capacity, self.states, self.sizes = capacity, dict[str, KVState](), dict[str, int]()
        self.errors = dict[str, Exception]()
        self.freed = list[str]()
        self._callback: Any = None

    def listen(self, callback: Any) -> None:
        self._callback = callback

    def come(self, name: str, error: Exception | None = None) -> None:
        self.states[name] = KVState.FAILED if error else KVState.READY
        if error:
            self.errors[name] = error
        self._callback()

    def can_allocate(self, one: Any) -> bool:
        return bool(sum(self.sizes.values()) + one.kv_nbytes <= self.capacity)

    def allocate(self, one: Any) -> None:
        if not self.can_allocate(one):
            raise CapacityError("no room")
        self.sizes[one.request_id] = one.kv_nbytes
        self.states[one.request_id] = KVState.ALLOCATED

    def prefetch(self, one: Any) -> None:
        self.states[one.request_id] = KVState.RECEIVING

    def state(self, name: str) -> KVState:
        return self.states.get(name, KVState.ABSENT)

    def error(self, name: str) -> Exception | None:
        return self.errors.get(name)

    def free(self, one: Any) -> None:
        if self.states.pop(one.request_id, None):
            self.freed.append(one.request_id)
        self.sizes.pop(one.request_id, None)

    def stats(self) -> dict[str, Any]:
        return {}


def scheduler(kv: FakeKVManager | None = None, seqs: int = 3, **fields: Any) -> SyncScheduler:
    return SyncScheduler(
        OmniDiffusionConfig("nowhere", max_num_seqs=seqs, **fields), cast("Any", kv)
    )


def plain(name: str, **fields: Any) -> Any:
    return request(name, need_kv_receive=False, **fields)


def run(made: SyncScheduler) -> list[str]:
    """Schedule one batch, and end it."""
    output = made.schedule()
    images = [torch.zeros(1, 1, 1, 3, dtype=torch.uint8)] * len(output.requests)
    done = made.update_from_output(output, ModelRunnerOutput(output.request_ids, list(images)))
    assert [one.request_id for one in done] == output.request_ids
    return output.request_ids


def test_first_come_first_served_up_to_the_limit() -> None:
    made = scheduler()
    assert made.max_num_running_reqs == made.max_num_seqs == 3
    for name in "abcde":
        made.add_request(plain(name))
    assert (made.num_waiting, made.num_running) == (5, 0)
    assert [run(made), run(made), run(made)] == [["a", "b", "c"], ["d", "e"], []]
    assert made.num_waiting == 0


def test_a_model_runners_output_by_the_names_of_its_document() -> None:
    fields: dict[str, Any] = {"sampled_token_ids": [], "spec_token_ids": None, "logprobs": None}
    output = ModelRunnerOutput(
        req_ids=["a", "b"],
        req_id_to_index={"a": 0, "b": 1},
        prompt_logprobs_dict={},
        pooler_output=[torch.zeros(1), torch.ones(1)],
        kv_connector_output=None,
        num_nans_in_logits=None,
        **fields,
    )
    assert output.result_of("b").output is output.pooler_output[1]
    assert ModelRunnerOutput(["a", "b"], [None, None]).req_id_to_index == {"a": 0, "b": 1}
    with pytest.raises(ValueError, match="req_ids say"):
        ModelRunnerOutput(["a", "b"], [None, None], req_id_to_index={"a": 1, "b": 0})


@pytest.mark.parametrize(
    "other",
    [
        {"height": 32},
        {"num_inference_steps": 7},
        {"guidance_scale": 2.0},
        {"guidance_scale_2": 2.0},
        {"cfg_interval": (0.0, 1.0)},
        {"num_outputs_per_prompt": 2},
        {"lora_int_id": 1},
        {"lora_scale": 0.5},
        {"lora_request": LoRARequest("style", 1, "somewhere")},
    ],
    ids=str,
)
def test_a_request_that_does_not_fit_holds_up_those_behind_it(other: dict[str, Any]) -> None:
    made = scheduler()
    for name, how in (("a", {}), ("odd", other), ("b", {}), ("c", {})):
        made.add_request(plain(name, **how))
    assert [run(made), run(made), run(made)] == [["a"], ["odd"], ["b", "c"]]


def test_seeds_and_prompts_share_a_batch() -> None:
    made = scheduler()
    made.add_request(plain("a", seed=1))
    made.add_request(plain("b", prompt="two hats", seed=2))
    assert run(made) == ["a", "b"]


def test_a_request_runs_once_its_kv_has_come_and_holds_up_no_other() -> None:
    kv = FakeKVManager()
    made = scheduler(kv)
    for name in "abc":
        made.add_request(request(name, kv_nbytes=10))
    assert set(kv.states.values()) == {KVState.RECEIVING}
    assert run(made) == []
    kv.come("c")
    kv.come("b")
    assert run(made) == ["b", "c"]
    kv.come("a")
    assert run(made) == ["a"]
    assert sorted(kv.freed) == ["a", "b", "c"]


def test_kv_that_fails_ends_its_request_alone() -> None:
    kv = FakeKVManager()
    made = scheduler(kv)
    ended = []
    made.listen(lambda: ended.append(made.take_ended()))
    for name in "ab":
        made.add_request(request(name, kv_nbytes=10))
    kv.come("a", TransferFailed("lost"))
    assert [(one.request_id, str(one.error)) for one in ended[0]] == [("a", "lost")]
    kv.come("b")
    assert run(made) == ["b"]
    assert kv.freed == ["a", "b"]


def test_receives_begin_in_order_and_within_the_budget() -> None:
    kv = FakeKVManager(capacity=100)
    made = scheduler(kv)
    for name, size in (("a", 60), ("large", 70), ("small", 30)):
        made.add_request(request(name, kv_nbytes=size))
    assert list(kv.states) == ["a"]  # "small" does not take the room that "large" waits for
    kv.come("a")
    assert run(made) == ["a"]
    made.schedule()
    assert list(kv.states) == ["large", "small"]


def test_kv_that_never_fits_is_an_error() -> None:
    kv = FakeKVManager(capacity=100)
    made = scheduler(kv)
    made.add_request(request("huge", kv_nbytes=101))
    made.add_request(request("a", kv_nbytes=10))
    (ended,) = made.take_ended()
    assert isinstance(ended.error, CapacityError)
    assert list(kv.states) == ["a"]


def test_without_prefetch_nothing_is_received_while_something_runs() -> None:
    kv = FakeKVManager()
    made = SyncScheduler(
        OmniDiffusionConfig("nowhere", kv=KVConfig(prefetch=False)), cast("Any", kv)
    )
    for name in "ab":
        made.add_request(request(name, kv_nbytes=10))
    assert list(kv.states) == ["a"]
    kv.come("a")
    output = made.schedule()
    assert output.request_ids == ["a"]
    assert "b" not in kv.states
    made.update_from_output(output, ModelRunnerOutput(["a"], [None]))
    made.schedule()
    assert list(kv.states) == ["b"]


def test_without_a_source_there_is_no_kv() -> None:
    made = scheduler()
    made.add_request(request("a"))
    (ended,) = made.take_ended()
    assert isinstance(ended.error, EngineError)


def test_an_abort_ends_a_waiting_request_at_once_and_a_running_one_later() -> None:
    kv = FakeKVManager()
    made = scheduler(kv, seqs=2)
    for name in "abc":
        made.add_request(request(name, kv_nbytes=10))
        kv.come(name)
    output = made.schedule()
    assert made.abort_request("a")
    assert not made.abort_request("c")
    assert not made.abort_request("unknown")
    assert [(one.request_id, type(one.error)) for one in made.take_ended()] == [
        ("c", RequestAborted)
    ]
    a, b = made.update_from_output(output, ModelRunnerOutput(["a", "b"], [torch.zeros(1)] * 2))
    assert isinstance(a.error, RequestAborted)
    assert (b.error, b.output is not None) == (None, True)
    assert sorted(kv.freed) == ["a", "b", "c"]


def test_results_that_are_missing_are_errors() -> None:
    made = scheduler()
    made.add_request(plain("a"))
    made.add_request(plain("b"))
    output = made.schedule()
    a, b = made.update_from_output(output, ModelRunnerOutput(["a"], [torch.zeros(1)]))
    assert a.error is None
    assert isinstance(b.error, EngineError)


def test_one_id_once() -> None:
    made = scheduler()
    made.add_request(plain("a"))
    with pytest.raises(EngineError, match="another id"):
        made.add_request(plain("a"))


def test_a_request_sent_to_the_next_stage_is_returned_once() -> None:
    made = scheduler()
    for name, expected in (("a", True), ("b", False), ("c", True)):
        made.add_request(plain(name, need_kv_transfer=expected))
    output = made.schedule()
    results = {"c": DiffusionOutput("c", error=EngineError("no"))}
    made.update_from_output(output, ModelRunnerOutput(["a", "b", "c"], [None] * 3, results))
    named = made.get_finished_requests_needing_kv_transfer()
    assert [one.request_id for one in named] == ["a"]
    assert made.get_finished_requests_needing_kv_transfer() == []


def test_requests_that_nobody_asks_for_are_not_kept() -> None:
    made = scheduler(seqs=100)
    names = [f"r{number}" for number in range(1100)]
    for name in names:
        made.add_request(plain(name, need_kv_transfer=True))
    for start in range(0, 1100, 100):
        assert run(made) == names[start : start + 100]
    named = made.get_finished_requests_needing_kv_transfer()
    assert [one.request_id for one in named] == names[-1024:]


# ---- waiting for a full batch


class SimulatedTime:
    """The clock of a scheduler, whose waits end at once: at their time, or with an event."""

    def __init__(self, made: SyncScheduler, patch: pytest.MonkeyPatch):
        self.made, self.now, self.events = made, 0.0, list[tuple[float, Any]]()
        patch.setattr(scheduler_module, "time", self)
        # The one wait of a scheduler: its time is the test's.
        patch.setattr(made._changed, "wait", self._wait)

    def monotonic(self) -> float:
        return self.now

    def waited(self, *, timeout: float, stable: float) -> float:
        """Seconds that the scheduler waits for a batch."""
        self.made.wait_for_batch(timeout=timeout, stable=stable)
        return self.now

    def _wait(self, timeout: float) -> None:
        end = self.now + timeout
        if self.events and self.events[0][0] <= end:
            self.now, call = self.events.pop(0)
            call()
        else:
            self.now = end


def simulated(monkeypatch: pytest.MonkeyPatch, *names: str, seqs: int = 4) -> SimulatedTime:
    """A scheduler in which these requests are ready."""
    made = scheduler(seqs=seqs)
    for name in names:
        made.add_request(plain(name))
    return SimulatedTime(made, monkeypatch)


def test_an_empty_queue_does_not_wait_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated(monkeypatch).waited(timeout=5, stable=5) == 0


def test_the_wait_ends_at_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = simulated(monkeypatch, "a", seqs=2)
    clock.events = [(1, lambda: clock.made.add_request(plain("b")))]
    assert clock.waited(timeout=10, stable=10) == 1


def test_the_wait_ends_when_no_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = simulated(monkeypatch, "a", seqs=3)
    clock.events = [(1, lambda: clock.made.add_request(plain("b")))]
    assert clock.waited(timeout=10, stable=2) == 3


def test_the_wait_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated(monkeypatch, "a").waited(timeout=2, stable=10) == 2


def test_the_wait_ends_when_the_engine_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = simulated(monkeypatch, "a")
    clock.events = [(1, clock.made.stop)]
    assert clock.waited(timeout=10, stable=10) == 1


def test_wait_sleeps_until_there_is_something_to_do() -> None:
    kv = FakeKVManager()
    made = scheduler(kv)
    assert not made.wait(timeout=0.1)
    made.add_request(request("a", kv_nbytes=1))
    assert not made.wait(timeout=0.1)
    threading.Timer(0.1, kv.come, ["a"]).start()
    assert made.wait(timeout=120)


# ---- the AR stage's


def ar(blocks: int = 8, seqs: int = 4) -> OmniARScheduler:
    how = OmniARConfig("nowhere", num_blocks=blocks, block_size=4, max_num_seqs=seqs)
    return OmniARScheduler(how, lambda one: {"gen": len(str(one.prompt)), "cfg_img": 0})


def test_prompts_get_blocks_in_order_and_give_them_back() -> None:
    made = ar()
    for name, tokens in (("a", 9), ("b", 16), ("c", 20), ("d", 1)):
        made.add_request(plain(name, prompt="x" * tokens))
    first = made.schedule()
    assert isinstance(first, ARSchedulerOutput)
    assert first.request_ids == ["a", "b"]  # 3 + 4 blocks of 8; "d" does not overtake "c"
    tables = [first.block_ids[name]["gen"] for name in "ab"]
    assert [len(table) for table in tables] == [3, 4]
    assert len(set(tables[0] + tables[1])) == 7
    assert made.blocks.num_free == 1
    step = ModelRunnerOutput(["a", "b"], [None, None], sampled_token_ids=[[1], [2]])
    assert made.update_from_output(first, step) == []  # both go on
    results = {name: DiffusionOutput(name) for name in "ab"}
    hidden = torch.arange(3.0)
    ended = made.update_from_output(first, ModelRunnerOutput(["a", "b"], [None, hidden], results))
    assert [one.hidden_states for one in ended] == [None, hidden]
    assert made.blocks.num_free == 8
    assert made.schedule().request_ids == ["c", "d"]


def test_a_prompt_without_enough_blocks_at_all_is_an_error() -> None:
    made = ar()
    made.add_request(plain("huge", prompt="x" * 33))
    made.add_request(plain("a", prompt="x"))
    assert made.schedule().request_ids == ["a"]
    (ended,) = made.take_ended()
    assert isinstance(ended.error, CapacityError)
    assert "num_blocks" in str(ended.error)


def test_a_prompts_tokens_are_counted_once() -> None:
    """Not in each step of the requests that have its blocks."""
    counted = list[str]()

    def count(one: Any) -> dict[str, int]:
        counted.append(one.request_id)
        return {"gen": len(one.prompt)}

    how = OmniARConfig("nowhere", num_blocks=4, block_size=4, max_num_seqs=4)
    made = OmniARScheduler(how, count)
    for name in "ab":
        made.add_request(plain(name, prompt="x" * 12))
    steps = [made.schedule() for _ in range(3)]
    assert [step.request_ids for step in steps] == [["a"]] * 3
    assert counted == ["a", "b"]
    made.update_from_output(steps[2], ModelRunnerOutput.failed(["a"], EngineError("it failed")))
    step = made.schedule()
    assert step.request_ids == ["b"]
    assert counted == ["a", "b"]
    made.update_from_output(step, ModelRunnerOutput.failed(["b"], EngineError("it failed")))
    made.add_request(plain("a", prompt="x"))
    assert made.schedule().request_ids == ["a"]
    assert counted == ["a", "b", "a"]
