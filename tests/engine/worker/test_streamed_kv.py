"""`GPUARModelRunner` sends each layer of a request's KV while the pass that computes it goes on."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVCacheBundle, KVConsumer, KVLink, PeerLostError, TransferFailed
from omni_kvlink.adapters import unpack_generator
from omni_kvlink.copier import PinnedCopier
from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.kv.kv_stream import KVStream
from omni_kvlink.testing import faults
from support.devices.fake_device import device as device
from support.devices.fake_device import directory as directory
from support.engine.ar_stage import (
    TOLERANCE,
    ar_engine,
    difference,
    kv_of,
    on_finish,
    prompt,
    read_alone,
    runner_of,
)
from support.engine.fixtures import WAIT, until
from support.link.ends import use_copier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.engine import AREngine
    from omni_kvlink.engine.tokens.outputs import KVSent
    from support.devices.fake_device import FakeDevice

# Reaches into _layers, _streams: which layers have left before the end is seen in the stream alone.

LAYERS = 3
IMAGE = torch.arange(64 * 48 * 3).reshape(64, 48, 3).to(torch.uint8)
PROMPTS: dict[str, tuple[Any, bool]] = {
    "text": ("a fox", False),
    "texts": (["a fox", "in the snow"], False),
    "image last": (["like this", IMAGE], False),
    "edit": ([IMAGE, "make it night"], False),
    "between": (["like", IMAGE, "blue"], False),
    "plan": ("a fox", True),
    "plan of an edit": ([IMAGE, "make it night"], True),
}
"""Prompts, and whether a plan is written after them: then the last pass reads the plan."""


@contextmanager
def reader_of(engine: AREngine, sockets: str) -> Iterator[KVConsumer]:
    with KVLink.connect(engine.sink_urls[0], timeout=WAIT, directory=sockets) as reader:
        yield reader


def layers_of(engine: AREngine) -> Any:
    """The layers of the engine's language model, in their order."""
    return runner_of(engine).utility.layers()


def before_layer(engine: AREngine, number: int, call: Callable[[], None]) -> None:
    """Have this called each time before a layer is computed."""
    layers_of(engine)[number].register_forward_pre_hook(lambda *_: call())


def live(engine: AREngine) -> int:
    """The payloads of the engine's link that have not ended."""
    sink = runner_of(engine).kv_sink
    assert sink is not None
    count: int = sink.link.stats()["transfers"]["live"]
    return count


def tensors_of(payload: Any) -> dict[str, list[torch.Tensor]]:
    """K and V of each layer, by branch."""
    assert isinstance(payload, KVCacheBundle)
    return {branch: list(map(torch.as_tensor, payload[branch].tensors())) for branch in payload}


def freed(engine: AREngine) -> None:
    """All memory of the link, and all blocks, are free again."""
    until(lambda: engine.stats()["link"]["memory"]["used"] == 0)
    assert engine.stats()["free_blocks"] == 4096


def test_a_layer_arrives_before_the_next_one_is_computed(sockets: str) -> None:
    """The reader has it in its hands: the pass waits for that."""
    with (
        ar_engine(sockets, think=False) as engine,
        reader_of(engine, sockets) as reader,
        ThreadPoolExecutor(1) as thread,
    ):
        stream = thread.submit(reader.stream_get, "a", timeout=WAIT)
        arrived = list[torch.Tensor]()

        def wait_for(number: int) -> None:
            layer = stream.result(WAIT).wait_for_layer(number, branch="gen", timeout=WAIT)
            arrived.append(layer.key.clone())

        for number in range(LAYERS - 1):
            before_layer(engine, number + 1, partial(wait_for, number))
        output = engine.submit(prompt("a")).result(WAIT)
        assert output.error is None
        expected: Any = read_alone("a fox").gen.past_key_values.key_cache
        assert len(arrived) == LAYERS - 1
        assert all(torch.equal(key, expected[i]) for i, key in enumerate(arrived))
        with stream.result(WAIT) as whole:
            whole.wait(timeout=WAIT)
        freed(engine)


@pytest.mark.parametrize("name", PROMPTS)
def test_what_arrives_is_what_one_process_computes(sockets: str, name: str) -> None:
    """All of it left in the passes, but for a branch that was complete before the last one."""
    text, think = PROMPTS[name]
    with ar_engine(sockets, think=think) as engine, reader_of(engine, sockets) as reader:
        left_behind = list[set[str]]()

        def finish(stream: KVStream, finish: Callable[[], KVSent]) -> KVSent:
            left_behind.append({branch for branch, _ in stream._layers})
            assert stream._streams, "nothing left before the end"
            return finish()

        on_finish(runner_of(engine), finish)
        output = engine.submit(prompt("a", text)).result(WAIT)
        assert output.error is None
        assert left_behind == [{"cfg_img"} if name == "plan of an edit" else set()]
        alone = read_alone(text, think=think, **({"max_think_tokens": 4} if think else {}))
        with reader.get("a", timeout=WAIT) as got:
            arrived = tensors_of(got)
            assert difference(arrived, kv_of(alone)) == 0.0
            assert isinstance(got, KVCacheBundle)
            for branch in got:
                context, metadata = getattr(alone, branch), got[branch].metadata
                assert [*metadata.kv_lens] == context.kv_lens
                assert [*metadata.ropes] == context.ropes
                assert metadata.image_shape == alone.image_shape
            unpack_generator(got["gen"].metadata.extra["generator"])
            assert output.kv_sent is not None
            assert output.kv_sent.tokens == alone.gen.kv_lens[0]
            del arrived
        freed(engine)


def test_a_prompt_that_is_read_in_chunks_leaves_in_the_last_one(sockets: str) -> None:
    text = "a fox and the other thing " * 4
    fields: Any = {"think": False, "max_num_batched_tokens": 7, "enable_chunked_prefill": True}
    with ar_engine(sockets, **fields) as engine, reader_of(engine, sockets) as reader:
        begun = list[int]()
        before_layer(engine, 0, lambda: begun.append(live(engine)))
        assert engine.submit(prompt("a", text)).result(WAIT).error is None
        assert len(begun) > 3
        assert not any(begun), "it was announced before its last pass"
        with reader.get("a", timeout=WAIT) as got:
            arrived = tensors_of(got)
            assert difference(arrived, kv_of(read_alone(text))) < TOLERANCE
            del arrived
        freed(engine)


def test_of_a_prompt_whose_beginning_is_cached_all_tokens_leave(sockets: str) -> None:
    fields: Any = {"think": False, "enable_prefix_caching": True, "block_size": 1}
    with ar_engine(sockets, **fields) as engine, reader_of(engine, sockets) as reader:
        for name in "ab":
            assert engine.submit(prompt(name)).result(WAIT).error is None
            with reader.get(name, timeout=WAIT) as got:
                arrived = tensors_of(got)
                assert difference(arrived, kv_of(read_alone("a fox"))) < TOLERANCE
                del arrived
        freed(engine)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_pass_that_fails_at_a_layer_fails_its_request(sockets: str, layer: int) -> None:
    """The reader learns why, at once; nothing is kept; the next request is not touched."""
    with (
        ar_engine(sockets, think=False) as engine,
        reader_of(engine, sockets) as reader,
        ThreadPoolExecutor(1) as thread,
    ):
        broken = [True]

        def fail() -> None:
            if broken.pop() if broken else False:
                raise RuntimeError("the device is on fire")

        before_layer(engine, layer, fail)
        reading = thread.submit(read_all, reader, "a")
        output = engine.submit(prompt("a")).result(WAIT)
        assert "the device is on fire" in str(output.error)
        with pytest.raises(TransferFailed, match="the device is on fire"):
            reading.result(WAIT)
        freed(engine)
        assert engine.submit(prompt("b")).result(WAIT).error is None
        read_all(reader, "b")
        freed(engine)


def test_a_pass_that_fails_ends_the_streams_of_all_who_share_it(sockets: str) -> None:
    with (
        ar_engine(sockets, think=False) as engine,
        reader_of(engine, sockets) as reader,
        ThreadPoolExecutor(2) as threads,
    ):
        begun = list[int]()

        def fail() -> None:
            begun.append(live(engine))
            raise RuntimeError("the device is on fire")

        hook = layers_of(engine)[1].register_forward_pre_hook(lambda *_: fail())
        reading = [threads.submit(read_all, reader, name) for name in "ab"]
        for output in engine.generate([prompt("a"), prompt("b")], timeout=WAIT):
            assert "the device is on fire" in str(output.error)
        for one in reading:
            with pytest.raises(TransferFailed, match="the device is on fire"):
                one.result(WAIT)
        assert begun == [2]
        freed(engine)
        hook.remove()
        assert engine.submit(prompt("a")).result(WAIT).error is None
        read_all(reader, "a")
        freed(engine)


def test_a_stream_that_its_reader_ends_fails_that_request_alone(sockets: str) -> None:
    """Both are read in one pass."""
    with ar_engine(sockets, think=False) as engine, reader_of(engine, sockets) as reader:

        def end() -> None:
            if not ended and live(engine):
                ended.append(True)
                reader.abort("a", "not wanted any more")
                until(lambda: live(engine) == 1)

        ended = list[bool]()
        before_layer(engine, 1, end)
        bad, good = engine.generate([prompt("a"), prompt("b")], timeout=WAIT)
        assert "not wanted any more" in str(bad.error)
        assert good.error is None
        read_all(reader, "b")
        freed(engine)


def test_an_abort_in_the_last_pass_ends_the_stream(sockets: str) -> None:
    with ar_engine(sockets, think=False) as engine, reader_of(engine, sockets) as reader:
        before_layer(engine, 1, lambda: engine.abort("a"))
        output = engine.submit(prompt("a")).result(WAIT)
        assert "aborted" in str(output.error)
        with pytest.raises(TransferFailed, match="aborted"):
            reader.get("a", timeout=WAIT)
        freed(engine)


def test_after_a_step_the_runner_has_the_cache_of_the_request_that_ended(sockets: str) -> None:
    """Its rows are in the blocks until the next step; nothing keeps the pools through `sleep`."""
    with ar_engine(sockets, think=False) as engine:
        runner = runner_of(engine)
        pools = [weakref.ref(pool) for pool in runner.pools.keys]
        with pytest.raises(RuntimeError, match="no request has run"):
            runner.get_past_key_values()
        for name, text in (("a", "a fox"), ("b", "two owls")):
            output = engine.submit(prompt(name, text)).result(WAIT)
            assert 0.0 < output.seconds["prefill"] <= output.seconds["execute"]
            cache: Any = runner.get_past_key_values()
            expected: Any = read_alone(text).gen.past_key_values
            for layer in range(LAYERS):
                assert torch.equal(cache.key_cache[layer], expected.key_cache[layer])
                assert torch.equal(cache.value_cache[layer], expected.value_cache[layer])
            engine.fail_kv(name, "not needed")
        del cache
        engine.sleep()
        gc.collect()
        assert not any(pool() is not None for pool in pools)


def test_a_writer_that_is_killed_between_two_layers_is_lost_to_its_reader(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader does not wait; the request fails at the engine, too."""
    monkeypatch.setenv(faults.VARIABLE, "stream.layer=kill")
    with (
        ar_engine(sockets, "mp", think=False) as engine,
        reader_of(engine, sockets) as reader,
        ThreadPoolExecutor(1) as thread,
    ):
        reading = thread.submit(read_all, reader, "a")
        assert isinstance(engine.submit(prompt("a")).result(WAIT).error, EngineDeadError)
        with pytest.raises(PeerLostError, match="layer 0 of branch 'gen'"):
            reading.result(WAIT)
    for left in Path(sockets).iterdir():
        left.unlink()


def read_all(reader: KVConsumer, key: str) -> None:
    with reader.stream_get(key, timeout=WAIT) as stream:
        for _ in stream:
            pass
        stream.wait(timeout=WAIT)


def test_on_a_device_layers_leave_behind_the_work_of_the_pass(
    sockets: str, device: FakeDevice
) -> None:
    """Each is announced once its copy has ended, and none waits for the pass.

    The host enqueues the next layer without a call that waits for the device.
    """
    pools = list[int]()
    device.holds = lambda view: _memory(view) in pools
    with (
        ar_engine(sockets, think=False) as engine,
        reader_of(engine, sockets) as reader,
        ThreadPoolExecutor(1) as thread,
    ):
        runner = runner_of(engine)
        use_copier(PinnedCopier(), runner.kv_sink.link)  # type: ignore[union-attr]
        pools += [pool.data_ptr() for pool in [*runner.pools.keys, *runner.pools.values]]
        stream = thread.submit(reader.stream_get, "a", timeout=WAIT)
        events = list[str]()

        def wait_for(number: int) -> None:
            stream.result(WAIT).wait_for_layer(number, branch="gen", timeout=WAIT)
            events.append(f"layer {number} arrived")

        for number in range(LAYERS - 1):
            before_layer(engine, number + 1, partial(wait_for, number))
            before_layer(engine, number, partial(events.append, f"layer {number}"))
        assert engine.submit(prompt("a")).result(WAIT).error is None
        assert events == ["layer 0", "layer 0 arrived", "layer 1", "layer 1 arrived"]
        assert device.crossed_nbytes > 0
        with stream.result(WAIT) as whole:
            whole.wait(timeout=WAIT)
        freed(engine)


def test_on_a_device_no_layer_holds_up_the_thread_that_enqueues(
    sockets: str, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is enqueued runs until the pass has ended, and no call waits for it."""
    pools, write = list[int](), KVStream.write_layer
    device.holds = lambda view: _memory(view) in pools

    def write_layer(stream: KVStream, layer: int, branch: str = "") -> None:
        with device.without_blocking():
            write(stream, layer, branch)

    def finish(stream: KVStream, finish: Callable[[], KVSent]) -> KVSent:
        assert not stream._layers
        device.hold(False)
        return finish()

    with ar_engine(sockets, think=False) as engine, reader_of(engine, sockets) as reader:
        runner = runner_of(engine)
        use_copier(PinnedCopier(), runner.kv_sink.link)  # type: ignore[union-attr]
        pools += [pool.data_ptr() for pool in [*runner.pools.keys, *runner.pools.values]]
        assert engine.submit(prompt("first")).result(WAIT).error is None  # it page-locks memory
        engine.fail_kv("first", "not needed")
        on_finish(runner, finish)
        monkeypatch.setattr(KVStream, "write_layer", write_layer)
        device.hold(True)
        assert engine.submit(prompt("a")).result(WAIT).error is None
        assert device.get("blocking") == 0
        with reader.get("a", timeout=WAIT) as got:
            arrived = tensors_of(got)
            assert difference(arrived, kv_of(read_alone("a fox"))) == 0.0
            del arrived
        freed(engine)


def _memory(view: Any) -> int:
    memory = getattr(view, "pool", view)
    return int(memory.data_ptr())
