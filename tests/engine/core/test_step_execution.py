"""`step_execution`: requests begin and end between the denoising steps of others."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from omni_kvlink import SchemaError, TransferFailed
from omni_kvlink.engine import DiffusionEngine
from omni_kvlink.engine.errors import EngineAsleepError, EngineError, RequestAborted, RequestFailed
from omni_kvlink.engine.executor.uniproc import UniprocExecutor
from omni_kvlink.engine.kv.kv_state import KVState
from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline
from support.engine.fixtures import WAIT, alone, config, has_calls, request, until
from support.engine.step_engine import LONG, SHORT, is_close, latent_of, result, step_engine


def test_a_request_that_arrives_later_is_in_the_same_passes_and_leaves_first(sockets: str) -> None:
    with step_engine(sockets) as made:
        late = made.at(3, lambda: made.submit("short", SHORT, seed=1, timestep_shift=1.0))

        def left() -> None:  # while the long one runs
            assert late[0].done()
            assert made.manager.state("short") is KVState.ABSENT
            assert made.engine.stats()["kv"]["held"]["ready"] == 1

        checked = made.at(8, left)
        long = made.submit("long")
        assert result(long).shape[0] == 1
        assert checked == [None]
        assert made.passes == [["long"]] * 3 + [["long", "short"]] * 3 + [["long"]] * 5
        assert len(made.passes) < (LONG - 1) + (SHORT - 1)
        for name, how in (
            ("long", {"num_inference_steps": LONG}),
            ("short", {"num_inference_steps": SHORT, "seed": 1, "timestep_shift": 1.0}),
        ):
            expected = latent_of(request(name, **how))
            assert is_close(made.latents[name][0], expected)


def test_a_request_that_runs_alone_has_the_bits_of_a_whole_run(sockets: str) -> None:
    with step_engine(sockets) as made:
        image = result(made.submit("a", seed=3))
        assert torch.equal(image[0], alone(seed=3, num_inference_steps=LONG))
        assert torch.equal(
            made.latents["a"][0], latent_of(request("a", seed=3, num_inference_steps=LONG))
        )


def test_requests_of_other_steps_and_numbers_of_images_share_passes(sockets: str) -> None:
    how: list[dict[str, Any]] = [
        {"steps": 9, "num_outputs_per_prompt": 2},
        {"steps": 5, "timestep_shift": 1.5},
        {"steps": 7},
    ]
    with step_engine(sockets) as made:
        later = [
            made.at(at, partial(made.submit, f"r{at}", seed=at, **fields))
            for at, fields in enumerate(how[1:], 1)
        ]
        assert len(result(made.submit("r0", **how[0]))) == 2
        for late in later:
            assert len(result(late[0])) == 1
        for at, fields in enumerate(how):
            own = {"num_inference_steps": fields.pop("steps"), **fields}
            expected = latent_of(request(f"r{at}", seed=at, **own))
            assert is_close(made.latents[f"r{at}"][0], expected)
        assert not is_close(made.latents["r0"][1], made.latents["r0"][0])
        assert len(made.passes) == 8


def test_images_of_two_sizes_run_in_one_step(sockets: str) -> None:
    """The size is that of the KV, and each size is a pass of its own."""
    shapes = {"a": (16, 24), "b": (8, 8)}
    with step_engine(sockets) as made:
        late = made.at(
            2, lambda: made.submit("b", SHORT, shape=shapes["b"], height=None, width=None)
        )
        first = made.submit("a", SHORT, shape=shapes["a"], height=None, width=None)
        assert tuple(result(first).shape[1:3]) == shapes["a"]
        assert tuple(result(late[0]).shape[1:3]) == shapes["b"]
        assert ["a", "b"] in made.passes
        for name, shape in shapes.items():
            one = request(name, num_inference_steps=SHORT)
            assert torch.equal(made.latents[name][0], latent_of(one, shape))


def test_an_abort_ends_a_request_before_its_next_step(sockets: str) -> None:
    """Its place is another's, and its KV released, in the next step."""
    with step_engine(sockets, max_num_seqs=2) as made:
        waiting = list[Any]()

        def abort() -> None:
            waiting.append(made.submit("c", SHORT, seed=2))
            made.engine.abort("b")

        made.at(4, abort)
        gone = made.at(5, lambda: made.manager.state("b"))
        late = made.at(1, lambda: made.submit("b", seed=1))
        assert result(made.submit("a")).shape[0] == 1
        with pytest.raises(RequestAborted):
            result(late[0])
        assert gone == [KVState.ABSENT]
        assert made.passes[:6] == [["a"], *[["a", "b"]] * 3, *[["a", "c"]] * 2]
        assert result(waiting[0]).shape[0] == 1
        again = made.submit("b", SHORT, seed=1)
        assert torch.equal(result(again)[0], alone(seed=1, num_inference_steps=SHORT))


def test_an_abort_of_the_only_request_ends_it(sockets: str) -> None:
    with step_engine(sockets) as made:
        made.at(2, lambda: made.engine.abort("a"))
        with pytest.raises(RequestAborted):
            result(made.submit("a", 10_000))
        assert len(made.passes) == 2


@pytest.mark.parametrize("fault", ["pass", "decode", "kv", "failed"])
def test_an_error_is_its_own_requests(sockets: str, fault: str) -> None:
    with step_engine(sockets) as made:
        pipeline = made.runner.pipeline

        def begin_fault() -> Any:
            if fault == "failed":
                made.producer.fail("bad", "the AR stage ran out of blocks")
                return made.engine.submit(request("bad", num_inference_steps=SHORT))
            if fault == "kv":  # it is for another size
                return made.submit("bad", SHORT, shape=(8, 8))
            velocity, decode = pipeline.model.velocity, pipeline.post_decode

            def failing(contexts: Any, *args: Any) -> Any:
                # The model is given contexts alone: which of them is the bad request's is known
                # there.
                bad = made.runner._running.get("bad")
                own = None if bad is None else bad.state.images[0].contexts.gen
                if any(one is own for one in contexts):
                    raise MemoryError("of this request")
                return velocity(contexts, *args)

            def undecoded(state: Any) -> Any:
                if state.request.request_id == "bad":
                    raise MemoryError("of this request")
                return decode(state)

            if fault == "pass":
                pipeline.model.velocity = failing
            else:
                pipeline.post_decode = undecoded
            return made.submit("bad", SHORT)

        bad = made.at(3, begin_fault)
        good = made.submit("good", seed=1)
        try:
            assert result(good).shape[0] == 1
        finally:
            vars(pipeline.model).pop("velocity", None)
        kind = {"kv": SchemaError, "failed": TransferFailed}.get(fault, RequestFailed)
        with pytest.raises(kind):
            result(bad[0])
        expected = latent_of(request("good", seed=1, num_inference_steps=LONG))
        assert is_close(made.latents["good"][0], expected)


def test_calls_wait_until_no_request_runs(sockets: str) -> None:
    with step_engine(sockets) as made:
        slept, late = list[bool](), list[Any]()
        thread = threading.Thread(target=lambda: slept.append(made.engine.sleep(timeout=WAIT)))

        def sleep() -> None:
            thread.start()
            until(lambda: has_calls(made.engine))
            late.append(made.submit("late", SHORT))

        made.at(2, sleep)
        assert result(made.submit("a", SHORT)).shape[0] == 1
        with pytest.raises(EngineAsleepError):
            result(late[0])
        thread.join(WAIT)
        assert slept == [True]
        assert made.passes == [["a"]] * (SHORT - 1)
        assert made.engine.wake_up(timeout=WAIT)
        assert torch.equal(
            result(made.submit("b", SHORT, seed=1))[0], alone(seed=1, num_inference_steps=SHORT)
        )


def test_closing_ends_requests_that_run(sockets: str) -> None:
    with step_engine(sockets) as made:
        entered, opened = threading.Event(), threading.Event()

        def hold() -> None:
            entered.set()
            assert opened.wait(WAIT)

        made.at(2, hold)
        future = made.submit("a", 10_000)
        assert entered.wait(WAIT)
        closing = threading.Thread(target=made.engine.close)
        closing.start()
        until(lambda: made.engine.scheduler.is_stopped)
        opened.set()
        closing.join(WAIT)
        with pytest.raises(EngineError):
            result(future)


def test_prompts_are_read_without_another_stage(sockets: str) -> None:
    with DiffusionEngine(config(None, stage="all", step_execution=True, max_num_seqs=2)) as engine:
        batch = [
            request(name, f"a fox and {name}", seed, need_kv_receive=False)
            for seed, name in enumerate("ab")
        ]
        for seed, output in enumerate(engine.generate(batch, timeout=WAIT)):
            expected = alone(f"a fox and {'ab'[seed]}", seed)
            assert (output.result()[0].int() - expected.int()).abs().max() <= 1
        assert engine.stats()["steps"] < 2 * 4


# ---- what is refused


def test_a_pipeline_that_runs_whole_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OmniBagelPipeline, "supports_step_execution", False)
    with pytest.raises(EngineError, match=r"OmniBagelPipeline has no supports_step_execution.*off"):
        DiffusionEngine(config(None, stage="all", step_execution=True))


def test_an_executor_that_runs_whole_requests_is_refused() -> None:
    class WholeRequests(UniprocExecutor):
        supports_step_execution = False

    with pytest.raises(EngineError, match="step_execution: WholeRequests runs whole requests"):
        WholeRequests(config(None, stage="all", step_execution=True))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"cache_backend": "tea_cache"}, "cache_backend 'tea_cache' with step_execution"),
        ({"request_batch_max_wait_ms": 5.0}, "request_batch_max_wait_ms 5.0 with step_execution"),
    ],
)
def test_settings_of_whole_batches_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config(None, step_execution=True, **fields)
