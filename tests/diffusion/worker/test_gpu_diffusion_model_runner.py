"""The runner: receives KV, converts it, runs the pipeline, sends KV to the next stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    KVCacheBundle,
    KVCacheTransferData,
    KVLink,
    KVProducer,
    SchemaError,
    TransferFailed,
)
from omni_kvlink.engine import (
    BatchRunnerOutput,
    CacheBackend,
    EngineError,
    RequestFailed,
    register_cache_backend,
)
from omni_kvlink.engine.worker import GPUDiffusionModelRunner
from omni_kvlink.models.bagel import BagelContexts
from omni_kvlink.payload.views import same_bytes
from support.engine.fixtures import WAIT, alone, bundle, config, link, request, url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.engine import OmniDiffusionRequest

CPU = torch.device("cpu")


@pytest.fixture
def producer(sockets: str) -> Iterator[KVProducer]:
    with link(sockets) as made:
        yield made


@pytest.fixture
def runner(producer: KVProducer, sockets: str) -> Iterator[GPUDiffusionModelRunner]:
    made = GPUDiffusionModelRunner(config(producer, sockets), CPU)
    yield made
    made.close()


def receive(runner: GPUDiffusionModelRunner, producer: KVProducer, *requests: Any) -> list[Any]:
    """What the scheduler does before a request runs."""
    receipts = []
    for one in requests:
        receipts.append(producer.put(bundle(one.request_id, one.prompt, one.sampling_params.seed)))
        receive_one(runner, one)
    return receipts


def receive_one(runner: GPUDiffusionModelRunner, one: OmniDiffusionRequest) -> None:
    assert runner.kv_manager
    assert runner.connector
    runner.kv_manager.receive_from_connector(runner.connector, one)


def results(output: BatchRunnerOutput) -> dict[str, Any]:
    return {one.request_id: one.result for one in output.runner_outputs}


def test_runner_kv_operations_via_manager(
    runner: GPUDiffusionModelRunner, producer: KVProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []

    def spy(owner: Any, name: str, note: Any) -> None:
        real = getattr(owner, name)

        def call(*args: Any) -> Any:
            answer = real(*args)
            calls.append((name, note(args, answer)))
            return answer

        monkeypatch.setattr(owner, name, call)

    one = request("r", "two hats", 3)
    (receipt,) = receive(runner, producer, one)
    sent = bundle("r", "two hats", 3)
    spy(runner.kv_manager, "get_kv_cache", lambda args, data: (args, data.difference(sent)))
    spy(runner.utility, "convert", lambda args, contexts: contexts)
    spy(runner.pipeline, "forward", lambda args, out: next(iter(args[0])).past_key_values)
    spy(runner.kv_manager, "free", lambda args, out: args[0].request_id)

    output = runner.execute_model([one])

    assert [name for name, _ in calls] == ["get_kv_cache", "convert", "forward", "free"]
    (_, got), (_, converted), (_, given), (_, freed) = calls
    assert got == (("r",), "")
    assert isinstance(converted, BagelContexts)
    assert given is converted
    assert freed == "r"
    assert torch.equal(results(output)["r"].result()[0], alone("two hats", 3))
    assert one.past_key_values is None
    calls.clear()
    del converted, given, got
    receipt.wait(timeout=WAIT)


def test_a_request_without_its_kv_is_an_error_and_the_others_are_right(
    runner: GPUDiffusionModelRunner, producer: KVProducer
) -> None:
    others = [request("a", "a fox", 1), request("b", "two hats", 2)]
    receive(runner, producer, *others)
    missing = request("missing")
    given = results(runner.execute_model([others[0], missing, others[1]]))
    with pytest.raises(EngineError, match="absent"):
        given["missing"].result()
    for other in others:
        expected = alone(other.prompt, other.sampling_params.seed or 0)
        assert (given[other.request_id].result()[0].int() - expected.int()).abs().max() <= 1


def incomplete(name: str, how: str) -> Any:
    whole = bundle(name)
    if how == "one cache":
        gen = whole["gen"]
        return KVCacheTransferData(name, gen.layer_blocks, (), gen.metadata)
    branches = dict(whole.branches)
    gen = whole["gen"]
    if how == "no cfg_text":
        del branches["cfg_text"]
    elif how == "a layer less":
        blocks = {part: layers[:-1] for part, layers in gen.layer_blocks.items()}
        metadata = {**gen.metadata.to_dict(), "num_layers": 2}
        branches = {"gen": KVCacheTransferData(name, blocks, (), metadata)}
        branches |= {other: KVCacheTransferData(name, blocks, (), metadata) for other in OTHERS}
    elif how == "another size":
        return bundle(name, shape=(8, 8))
    elif how == "no generator":
        metadata = {**gen.metadata.to_dict(), "extra": {}}
        branches["gen"] = KVCacheTransferData(name, gen.layer_blocks, (), metadata)
    return KVCacheBundle(name, branches)


OTHERS = ("cfg_text", "cfg_img")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("one cache", "is one cache"),
        ("no cfg_text", "lacks cfg_text"),
        ("a layer less", "K has 2 layers, the model 3"),
        ("another size", r"is for \(8, 8\), not for \(16, 24\)"),
        ("no generator", "without a generator"),
    ],
)
def test_an_incomplete_or_unfit_kv_is_an_error_and_never_an_image(
    runner: GPUDiffusionModelRunner, producer: KVProducer, how: str, message: str
) -> None:
    one, other = request("r"), request("other", "a fox", 1)
    receipt = producer.put(incomplete("r", how))
    receive_one(runner, one)
    receive(runner, producer, other)
    given = results(runner.execute_model([one, other]))
    with pytest.raises(SchemaError, match=message):
        given["r"].result()
    assert torch.equal(given["other"].result()[0], alone("a fox", 1))
    receipt.wait(timeout=WAIT)


def test_a_failing_pipeline_releases_every_kv(
    runner: GPUDiffusionModelRunner, producer: KVProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(runner.pipeline, "denoise_batch", fail)
    requests = [request("a"), request("b")]
    receipts = receive(runner, producer, *requests)
    given = results(runner.execute_model(requests))
    for one in given.values():
        with pytest.raises(RequestFailed, match="no more memory"):
            one.result()
    for receipt in receipts:
        receipt.wait(timeout=WAIT)


def test_an_intermediate_stage_sends_the_kv_on(producer: KVProducer, sockets: str) -> None:
    sink = url()
    how = config(producer, sockets, kv_sinks=(sink,), kv_sink_options={"directory": sockets})
    runner = GPUDiffusionModelRunner(how, CPU)
    with KVLink.connect(sink, timeout=WAIT, directory=sockets) as downstream:
        one = request("r", "two hats", 3, need_kv_transfer=True)
        receive(runner, producer, one)
        output = results(runner.execute_model([one]))["r"]
        assert torch.equal(output.result()[0], alone("two hats", 3))
        with downstream.get("r", timeout=WAIT, verify="full") as data:
            sent = bundle("r", "two hats", 3)
            assert isinstance(data, KVCacheBundle)
            for name in sent:
                mine, theirs = sent[name], data[name]
                assert theirs.block_ids == []
                assert theirs.metadata == mine.metadata
                for ours, others in zip(mine.tensors(), theirs.tensors(), strict=True):
                    assert same_bytes(ours, others)
            assert output.kv_sent.image_shape == data["gen"].metadata.image_shape
    runner.close()


def test_a_request_that_fails_here_fails_in_the_next_stage_at_once(
    producer: KVProducer, sockets: str
) -> None:
    sink = url()
    how = config(producer, sockets, kv_sinks=(sink,), kv_sink_options={"directory": sockets})
    runner = GPUDiffusionModelRunner(how, CPU)
    with KVLink.connect(sink, timeout=WAIT, directory=sockets) as downstream:
        runner.execute_model([request("r", need_kv_transfer=True)])
        with pytest.raises(TransferFailed, match="absent"):
            downstream.get("r", timeout=WAIT)
    runner.close()


class Counting(CacheBackend):
    """Hooks into nothing; counts."""

    def enable(self, pipeline: Any) -> None:
        self.enabled, self.refreshed = True, list[int]()

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        self.refreshed.append(num_inference_steps)


def test_a_cache_backend_is_refreshed_before_each_generation() -> None:
    register_cache_backend("counting", f"{__name__}:Counting")
    runner = GPUDiffusionModelRunner(config(None, stage="all", cache_backend="counting"), CPU)
    for name in "ab":
        runner.execute_model([request(name, need_kv_receive=False)])
    assert isinstance(runner.cache_backend, Counting)
    assert runner.cache_backend.refreshed == [5, 5]
    runner.close()


def test_an_unknown_cache_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match="no cache backend 'warp'"):
        GPUDiffusionModelRunner(config(None, cache_backend="warp"), CPU)
