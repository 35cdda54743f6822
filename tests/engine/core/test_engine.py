"""The engine as a whole: many requests, missing or wrong KV, and aborts."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from omni_kvlink import (
    ClosedError,
    IntegrityError,
    KVLinkError,
    KVProducer,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.engine import DiffusionEngine, OmniDiffusion
from omni_kvlink.engine.errors import EngineAsleepError, RequestAborted
from support.engine.fixtures import (
    WAIT,
    allocate_copy,
    alone,
    bundle,
    checkpoint,
    close_to,
    config,
    link,
    pipeline,
    request,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from omni_kvlink.engine.outputs import DiffusionOutput

CONNECTORS = {
    "shm": {"name": "SharedMemoryConnector"},
    "zmq": {"name": "KVLinkConnector", "extra": {"url": "zmq+tcp://127.0.0.1:0"}},
}


@pytest.mark.parametrize(
    ("connector", "seqs"),
    [
        ("shm", 4),
        ("zmq", 1),
        pytest.param("shm", 1, marks=pytest.mark.slow),
        pytest.param("zmq", 4, marks=pytest.mark.slow),
    ],
)
def test_64_requests_of_mixed_sizes(connector: str, seqs: int) -> None:
    how = {
        "pipeline": "bagel",
        "stages": [
            {"stage_id": 0, "max_num_seqs": 3},
            {
                "stage_id": 1,
                "max_num_seqs": seqs,
                "input_connectors": {"from_stage_0": "wire"},
            },
        ],
        "connectors": {"wire": CONNECTORS[connector]},
    }
    sizes = [(16, 24), (8, 8), (16, 24), (32, 16)]
    params = [
        {"height": h, "width": w, "num_inference_steps": 3, "seed": seed}
        for seed in range(64)
        for h, w in [sizes[seed // 5 % 4]]
    ]
    prompts = [f"a fox, number {seed} " + "and so on " * (seed % 9) for seed in range(64)]
    work = list(zip(prompts, params, strict=True))
    with OmniDiffusion(checkpoint(), how, dtype="float32") as omni:
        reader = cast("DiffusionEngine", omni.stages[1])
        opened, _ = hold(reader)  # until all are there, so that batches are full
        futures = [omni.submit(*one, request_id=str(at)) for at, one in enumerate(work)]
        until(lambda: reader.stats()["kv"]["received"] == 64)
        opened.set()
        images = [future.result(WAIT).result() for future in futures]
        ar, dit = omni.stats()
        assert (ar["waiting"], ar["running"], ar["free_blocks"]) == (0, 0, 1024)
        assert (dit["waiting"], dit["running"], dit["kv"]["charged"]) == (0, 0, 0)
        assert (dit["kv"]["received"], dit["kv"]["freed"]) == (64, 64)
        assert dit["steps"] == 64 if seqs == 1 else dit["steps"] < 40
        assert runner_of(reader).connector.link.stats()["waiting"] == 0
        assert link_used(omni) == 0
    for (prompt, fields), image in zip(work, images, strict=True):
        expected = alone(prompt, **fields)
        same = torch.equal if seqs == 1 else close_to
        assert same(image[0], expected), prompt


def runner_of(engine: DiffusionEngine) -> Any:
    executor: Any = engine.executor
    return executor.worker.model_runner


def link_used(omni: OmniDiffusion) -> int:
    """Bytes of the AR stage's link that are in use; releases may be in progress."""
    deadline = time.monotonic() + WAIT
    while (used := omni.stats()[0]["link"]["memory"]["used"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(used)


class EngineFixture:
    """An engine whose KV this process sends."""

    def __init__(self, producer: KVProducer, sockets: str, **fields: Any):
        self.producer = producer
        self.engine = DiffusionEngine(config(producer, sockets, **fields))

    def send(self, name: str, **how: Any) -> Any:
        return self.producer.put(bundle(name, **how))

    def submit(self, name: str, **fields: Any) -> Future[DiffusionOutput]:
        return self.engine.submit(request(name, **fields))

    @property
    def manager(self) -> Any:
        return self.engine.executor.kv_manager


@pytest.fixture
def fixture(sockets: str) -> Iterator[EngineFixture]:
    with link(sockets) as producer:
        made = EngineFixture(producer, sockets, max_num_seqs=4, request_batch_max_wait_ms=200.0)
        yield made
        made.engine.close()


def put_corrupted(producer: KVProducer, name: str) -> Any:
    """Put a KV of which one bit is wrong."""
    data, wrong = allocate_copy(producer, name, "key_cache", layer=2)
    receipt = producer.put(data)
    wrong.view(torch.int32)[1, 1, 1] ^= 1
    return receipt


@pytest.mark.parametrize("fault_kind", ["missing", "late", "corrupt", "failed", "another size"])
def test_what_one_request_lacks_is_its_own_error(fixture: EngineFixture, fault_kind: str) -> None:
    others = {name: fixture.submit(name, seed=seed) for seed, name in enumerate("ab")}
    kind: Any = TransferTimeout
    if fault_kind == "corrupt":  # before a get is pending, which would verify it at once
        put_corrupted(fixture.producer, "bad")
        kind = IntegrityError
    missing = fault_kind in ("missing", "late")
    future = fixture.submit("bad", kv_timeout=0.3 if missing else None)
    if fault_kind == "failed":
        fixture.producer.fail("bad", "the AR stage ran out of blocks")
        kind = TransferFailed
    elif fault_kind == "another size":
        fixture.producer.put(bundle("bad", shape=(8, 8)))
        kind = SchemaError
    for seed, name in enumerate("ab"):
        fixture.send(name, seed=seed)
    with pytest.raises(kind) as caught:
        future.result(WAIT).result()
    assert not missing or (caught.value.key, caught.value.waited) == ("bad", 0.3)
    if fault_kind == "late":
        fixture.producer.put(bundle("bad"), ttl=WAIT)
        fixture.producer.abort("bad")
    for seed, (_name, other) in enumerate(others.items()):
        assert close_to(other.result(WAIT).result()[0], alone(seed=seed))
    assert fixture.manager.stats()["charged"] == 0


def test_an_error_comes_at_its_deadline_while_others_run(fixture: EngineFixture) -> None:
    opened, entered = hold(fixture.engine)
    fixture.send("slow")
    slow = fixture.submit("slow")
    assert entered.wait(WAIT)
    started = time.monotonic()
    with pytest.raises(TransferTimeout):
        fixture.submit("missing", kv_timeout=0.3).result(WAIT).result()
    assert time.monotonic() - started >= 0.3
    opened.set()  # so the other one was running all the time
    assert torch.equal(slow.result(WAIT).result()[0], alone())


def hold(engine: DiffusionEngine) -> tuple[threading.Event, threading.Event]:
    """Keep the first step of every batch until the first event; the second is set meanwhile."""
    opened, entered = threading.Event(), threading.Event()
    hooks = runner_of(engine).pipeline.hooks

    def layers(branch: str, step: int, rows: Any, run: Any, count: int) -> Any:
        if (branch, step) == ("gen", 0):
            entered.set()
            assert opened.wait(WAIT)
        return run(rows, 0, count)

    hooks.layers = layers
    return opened, entered


def test_sabotage_no_image_without_its_kv(
    fixture: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KV that is lost on its way to the pipeline causes an error, never an image."""
    runner = runner_of(fixture.engine)
    faults: list[tuple[Any, str, Any]] = [
        (runner.kv_manager, "get_kv_cache", lambda _: None),
        (runner.utility, "convert", lambda *_: None),
        (runner.utility, "convert", lambda *_: pipeline().prefill("", image_shape=(8, 8)).gen),
        (runner, "_take_kv_cache", lambda *_: True),
    ]
    for owner, name, fault in faults:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            receipt = fixture.send("r")
            output = fixture.submit("r").result(WAIT)
            with pytest.raises(KVLinkError):
                output.result()
            assert output.output is None
            receipt.wait(timeout=WAIT)
    fixture.send("r")
    assert torch.equal(fixture.submit("r").result(WAIT).result()[0], alone())


# ---- aborts


@pytest.mark.parametrize("when", ["queued", "receiving", "running"])
def test_an_abort_ends_one_request_and_gives_its_memory_back(
    fixture: EngineFixture, when: str
) -> None:
    opened, entered = hold(fixture.engine)
    receipts = []
    if when != "running":
        receipts.append(fixture.send("first"))
        first = fixture.submit("first")
        assert entered.wait(WAIT)
    if when != "receiving":
        receipts.append(fixture.send("r"))
    future = fixture.submit("r")
    if when == "running":
        assert entered.wait(WAIT)
    elif when == "queued":
        until(lambda: fixture.manager.stats()["held"]["ready"] == 2)
    fixture.engine.abort("r")
    if when != "running":  # while the other one runs
        with pytest.raises(RequestAborted, match="waiting"):
            future.result(WAIT).result()
    opened.set()
    with pytest.raises(RequestAborted):
        future.result(WAIT).result()
    if when != "running":
        assert torch.equal(first.result(WAIT).result()[0], alone())
    for receipt in receipts:
        receipt.wait(timeout=WAIT)
    fixture.send("next", seed=2)
    assert torch.equal(fixture.submit("next", seed=2).result(WAIT).result()[0], alone(seed=2))
    assert fixture.manager.stats()["charged"] == 0


def test_an_abort_in_a_batch_leaves_the_others(fixture: EngineFixture) -> None:
    first_opened, entered = hold(fixture.engine)
    fixture.send("first")
    fixture.submit("first", num_inference_steps=2)
    assert entered.wait(WAIT)
    for seed, name in enumerate("abcd"):
        fixture.send(name, seed=seed)
    futures = [fixture.submit(name, seed=seed) for seed, name in enumerate("abcd")]
    until(lambda: fixture.manager.stats()["held"]["ready"] == 5)
    opened, entered = hold(fixture.engine)
    first_opened.set()
    assert entered.wait(WAIT)
    assert fixture.engine.scheduler.num_running == 4
    fixture.engine.abort("b")
    opened.set()
    outputs = [future.result(WAIT) for future in futures]
    assert isinstance(outputs[1].error, RequestAborted)
    for seed in (0, 2, 3):
        assert close_to(outputs[seed].result()[0], alone(seed=seed))


def test_when_all_of_a_batch_are_aborted_it_ends(fixture: EngineFixture) -> None:
    opened, entered = hold(fixture.engine)
    fixture.send("r")
    future = fixture.submit("r", num_inference_steps=10_000)
    assert entered.wait(WAIT)
    fixture.engine.abort("r")
    opened.set()
    with pytest.raises(RequestAborted, match="after 1 of 9999"):
        future.result(WAIT).result()


# ---- the engine itself


def test_several_images_of_one_prompt(fixture: EngineFixture) -> None:
    fixture.send("r", seed=5)
    images = fixture.submit("r", seed=5, num_outputs_per_prompt=2).result(WAIT).result()
    assert tuple(images.shape) == (2, 16, 24, 3)
    assert close_to(images[0], alone(seed=5))
    assert not close_to(images[1], images[0])


def test_what_the_model_cannot_do_is_an_error(fixture: EngineFixture) -> None:
    wrong: dict[str, Any] = {
        "cfg_renorm_type": "none",
        "negative_prompt": "blur",
        "true_cfg_scale": 4.0,
    }
    for name, value in wrong.items():
        fixture.send(name)
        with pytest.raises(SchemaError, match=name.replace("cfg_renorm_type", "renorm")):
            fixture.submit(name, **{name: value}).result(WAIT).result()


def test_a_timeout_aborts_what_is_late(fixture: EngineFixture) -> None:
    with pytest.raises(TransferTimeout, match="missing not done"):
        fixture.engine.generate([request("missing")], timeout=0.2)
    until(lambda: fixture.manager.stats()["charged"] == 0)
    fixture.send("a")
    fixture.send("b")
    fixture.engine.generate([request("a"), request("b")], timeout=WAIT)
    fixture.send("c")
    (output,) = fixture.engine.step([request("c")])
    assert (output.request_id, output.error) == ("c", None)


def test_closing_ends_what_waits_and_what_runs(sockets: str) -> None:
    with link(sockets) as producer:
        fixture = EngineFixture(producer, sockets)
        opened, entered = hold(fixture.engine)
        fixture.send("runs")
        runs, waits = fixture.submit("runs"), fixture.submit("waits")
        assert entered.wait(WAIT)
        closing = threading.Thread(target=fixture.engine.close)
        closing.start()
        opened.set()
        closing.join(WAIT)
        for future in (runs, waits):
            with pytest.raises((ClosedError, RequestAborted)):
                future.result(WAIT).result()
        with pytest.raises(ClosedError):
            fixture.submit("later")
        fixture.engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_the_engine_sleeps_between_batches(fixture: EngineFixture, level: int) -> None:
    assert fixture.engine.sleep(level)
    fixture.send("a")
    with pytest.raises(EngineAsleepError):
        fixture.submit("a").result(WAIT).result()
    assert fixture.engine.wake_up()
    fixture.send("b")
    assert torch.equal(fixture.submit("b").result(WAIT).result()[0], alone())


def test_all_come_through_a_budget_for_one(sockets: str) -> None:
    with link(sockets) as producer:
        nbytes = [producer.put(bundle(f"r{seed}", seed=seed)).ledger.nbytes for seed in range(6)]
        fixture = EngineFixture(producer, sockets, max_num_seqs=2, kv_budget=max(nbytes) + 1)
        futures = [fixture.submit(f"r{n}", seed=n, kv_nbytes=nbytes[n]) for n in range(6)]
        for seed, future in enumerate(futures):
            assert torch.equal(future.result(WAIT).result()[0], alone(seed=seed))
        fixture.engine.close()


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_prefetch_receives_while_another_request_runs(sockets: str, prefetch: bool) -> None:
    with link(sockets) as producer:
        fixture = EngineFixture(producer, sockets, kv_prefetch=prefetch)
        opened, entered = hold(fixture.engine)
        events = record(fixture)
        for name in ("first", "second"):
            fixture.send(name)
        futures = [fixture.submit("first")]
        assert entered.wait(WAIT)
        futures.append(fixture.submit("second"))
        if prefetch:  # comes while the first one runs
            until(lambda: fixture.manager.stats()["held"]["ready"] == 2)
        opened.set()
        for future in futures:
            assert torch.equal(future.result(WAIT).result()[0], alone())
        fixture.engine.close()
    order = ["receive first", "run first", "receive second", "end first", "run second"]
    if not prefetch:
        order[2:4] = ["end first", "receive second"]
    assert events == [*order, "end second"]


def record(fixture: EngineFixture) -> list[str]:
    """When each receive began, and when each batch began and ended."""
    events: list[str] = []
    executor: Any = fixture.engine.executor
    run, receive = executor.execute_model, fixture.manager.prefetch

    def execute(scheduled: Any) -> Any:
        (name,) = scheduled.request_ids
        events.append(f"run {name}")
        try:
            return run(scheduled)
        finally:
            events.append(f"end {name}")

    def prefetch(one: Any) -> None:
        events.append(f"receive {one.request_id}")
        receive(one)

    executor.execute_model, fixture.manager.prefetch = execute, prefetch
    return events
