"""An AR stage: requests run together, and each leaves when its own KV is sent."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import AREngine, DiffusionEngine, OmniDiffusionConfig, OmniDiffusionRequest
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineAsleepError, RequestAborted
from omni_kvlink.engine.outputs import ARSchedulerOutput
from omni_kvlink.testing.rig import until
from support.engine.ar_stage import Passes, ar_engine, on_finish, prompt, runner_of
from support.engine.fixtures import SHAPE, WAIT, alone, checkpoint, has_calls, pipeline, request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.engine.kv.kv_stream import KVStream
    from omni_kvlink.engine.tokens.outputs import KVSent

PROMPTS = ("a fox", "two owls in the rain", "the sea")


@contextmanager
def both_stages(sockets: str, **fields: Any) -> Iterator[tuple[AREngine, DiffusionEngine]]:
    with ar_engine(sockets, **fields) as ar:
        kv = KVConfig(sources=ar.sink_urls, source_options={"directory": sockets}, timeout=WAIT)
        dit = DiffusionEngine(OmniDiffusionConfig(checkpoint(), dtype="float32", kv=kv))
        with dit:
            yield ar, dit


def image_of(dit: DiffusionEngine, name: str, **fields: Any) -> torch.Tensor:
    return dit.submit(request(name, **fields)).result(WAIT).result()[0]


def thought(text: str, **fields: Any) -> str | None:
    """What the model writes for a prompt that it reads alone."""
    generator = torch.Generator().manual_seed(fields.pop("seed", 0))
    model = pipeline()
    contexts = model.prefill(text, think=True, image_shape=SHAPE, generator=generator, **fields)
    model.release_caches()
    return contexts.text


def test_a_short_text_does_not_wait_for_a_long_one(sockets: str) -> None:
    """The first image is there while the second's text is being written."""
    shown = threading.Event()
    with both_stages(sockets) as (ar, dit):

        def hold(number: int) -> None:
            if number == 8:
                shown.wait(WAIT)

        Passes(ar, hold)
        outputs = [ar.submit(prompt(name, max_tokens=most)) for name, most in (("a", 4), ("b", 40))]
        outputs.append(ar.submit(prompt("c", max_tokens=40)))
        first = outputs[0].result(WAIT)
        assert first.error is None
        assert image_of(dit, "a").shape == (*SHAPE, 3)
        assert [one.done() for one in outputs] == [True, False, False]
        shown.set()
        assert all(one.result(WAIT).error is None for one in outputs)
        assert ar.stats()["free_blocks"] == 4096
        for name in "bc":
            ar.fail_kv(name, "not needed")


@pytest.mark.parametrize("backend", ["uni", "mp"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_that_are_written_together_are_those_of_each_alone(
    sockets: str, backend: str, temperature: float
) -> None:
    with ar_engine(sockets, backend) as engine:
        passes = Passes(engine) if backend == "uni" else None
        batch = [
            prompt(str(seed), text, seed=seed, max_tokens=9 + seed, temperature=temperature)
            for seed, text in enumerate(PROMPTS)
        ]
        outputs = engine.generate(batch, timeout=WAIT)
        for seed, (text, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
            how = {"do_sample": temperature > 0, "temperature": temperature or 0.3}
            assert output.error is None
            assert output.text == thought(text, seed=seed, max_think_tokens=9 + seed, **how)
            engine.fail_kv(str(seed), "not needed")
        assert passes is None or max(passes.sizes) == 3


def test_without_a_text_an_image_is_that_of_one_process(sockets: str) -> None:
    with both_stages(sockets, think=False) as (ar, dit):
        for output in ar.generate([prompt("a"), prompt("b", PROMPTS[1])], timeout=WAIT):
            assert output.error is None
        assert image_of(dit, "b", prompt=PROMPTS[1]).equal(alone(PROMPTS[1]))
        assert image_of(dit, "a").equal(alone("a fox"))


def test_an_abort_ends_a_text_within_one_token(sockets: str) -> None:
    with ar_engine(sockets) as engine:

        def abort(number: int) -> None:
            if number == 5:
                engine.abort("b")

        passes = Passes(engine, abort)
        outputs = [engine.submit(prompt(name, max_tokens=12)) for name in "ab"]
        aborted, other = outputs[1].result(WAIT), outputs[0].result(WAIT)
        assert isinstance(aborted.error, RequestAborted)
        assert other.error is None
        joint = [size for size in passes.sizes if size == 2]
        assert len(joint) <= 5
        assert passes.sizes[passes.sizes.index(2) + len(joint) :].count(2) == 0
        assert engine.stats()["free_blocks"] == 4096
        engine.fail_kv("a", "not needed")


def test_an_aborted_request_may_come_again(sockets: str) -> None:
    """In another process, too; what remembers the abort forgets it with the request."""
    with ar_engine(sockets, "mp", num_blocks=1 << 15) as engine:
        first = engine.submit(prompt("a", max_tokens=100_000))
        other = engine.submit(prompt("b", max_tokens=10))
        other.result(WAIT)  # they are running
        engine.abort("a")
        assert isinstance(first.result(WAIT).error, RequestAborted)
        again = engine.submit(prompt("a")).result(WAIT)
        assert (again.error, again.text) == (None, thought("a fox", max_think_tokens=4))
        assert engine.stats()["running"] == 0
        for name in "ab":
            engine.fail_kv(name, "not needed")


def test_one_request_that_fails_is_its_own_error(sockets: str) -> None:
    with ar_engine(sockets) as engine:
        utility = engine.executor.worker.runner.utility  # type: ignore[attr-defined]
        extract = utility.extract

        def refuse(one: OmniDiffusionRequest) -> Any:
            if one.request_id == "a":
                raise MemoryError("no memory")
            return extract(one)

        utility.extract = refuse
        bad, good = engine.generate([prompt("a"), prompt("b")], timeout=WAIT)
        assert "no memory" in str(bad.error)
        assert good.error is None
        assert engine.stats()["free_blocks"] == 4096
        engine.fail_kv("b", "not needed")


def test_a_request_begins_while_another_runs(sockets: str) -> None:
    with ar_engine(sockets) as engine:
        later = list[Any]()

        def submit(number: int) -> None:
            if number == 3:
                later.append(engine.submit(prompt("b")))

        passes = Passes(engine, submit)
        assert engine.submit(prompt("a", max_tokens=12)).result(WAIT).error is None
        assert later[0].result(WAIT).error is None
        assert 2 in passes.sizes
        for name in "ab":
            engine.fail_kv(name, "not needed")


def test_calls_wait_until_no_request_runs(sockets: str) -> None:
    """`sleep` takes the blocks away: requests that run end first, and no other begins."""
    with ar_engine(sockets) as engine:
        threads, slept = list[threading.Thread](), list[bool]()
        late = list[Any]()

        def sleep(number: int) -> None:
            if number == 2:
                threads.append(threading.Thread(target=call))
                threads[0].start()
                until(lambda: has_calls(engine), "the call waits")
                late.append(engine.submit(prompt("late")))

        def call() -> None:
            slept.append(engine.sleep(timeout=WAIT))

        passes = Passes(engine, sleep)
        assert engine.submit(prompt("a", max_tokens=12)).result(WAIT).error is None
        assert isinstance(late[0].result(WAIT).error, EngineAsleepError)
        assert set(passes.sizes) == {1}
        threads[0].join(WAIT)
        assert slept == [True]
        assert engine.wake_up(timeout=WAIT)
        assert engine.submit(prompt("b")).result(WAIT).error is None
        for name in "ab":
            engine.fail_kv(name, "not needed")


def test_a_request_that_is_no_longer_scheduled_is_forgotten(sockets: str) -> None:
    with ar_engine(sockets) as engine:
        worker = engine.executor.worker  # type: ignore[attr-defined]
        one = prompt("a")
        tables = {"a": {name: [*range(40)] for name in worker.count_tokens(one)}}
        assert worker.execute_model(ARSchedulerOutput([one], tables)).results == {}
        # What a runner keeps of a request costs memory, and shows nowhere, here and below.
        assert list(worker.runner._prefills) == ["a"]
        worker.execute_model(ARSchedulerOutput([prompt("b")], {"b": tables["a"]}))
        # As above.
        assert list(worker.runner._prefills) == ["b"]


def test_an_abort_after_the_kv_was_sent_frees_it(sockets: str) -> None:
    with ar_engine(sockets) as engine:

        def abort_then(stream: KVStream, finish: Callable[[], KVSent]) -> KVSent:
            sent = finish()
            engine.abort("a")
            return sent

        on_finish(runner_of(engine), abort_then)
        assert isinstance(engine.submit(prompt("a")).result(WAIT).error, RequestAborted)
        assert engine.stats()["link"]["memory"]["used"] == 0
