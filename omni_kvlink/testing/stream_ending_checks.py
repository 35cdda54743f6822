"""Checks of streams that fail, are aborted or closed before their commit."""

from __future__ import annotations

import contextlib
import gc
import threading
from functools import partial
from typing import TYPE_CHECKING

import torch

from omni_kvlink.errors import (
    ClosedError,
    KVLinkError,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.testing.caches import Layers, Recipe, fingerprint, hash_tensors
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import SLACK, Rig, expect, receive, until, until_freed, until_requested
from omni_kvlink.testing.stream_checks import begin, finish, wait_layer, write

if TYPE_CHECKING:
    from omni_kvlink.link import KVConsumer, KVProducer, PutStream, ReceivedStream

THREE = Recipe("s", layers=3)


def _begin(
    producer: KVProducer, reader: RemoteLink, *, readers: int = 1, written: int = 0
) -> tuple[PutStream, Layers]:
    """Begin a stream of `THREE` that a reader has, with the first layers written and received."""
    out, layers = begin(producer, THREE, readers=readers)
    reader.call("stream_get", key="s", timeout=5)
    for layer in range(written):
        write(out, layers, ("kv", layer))
        wait_layer(reader, "s", layer)
    return out, layers


def check_failing_writer(rig: Rig) -> None:
    """An error in the writer's block wakes every reader, whatever it waits for."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    out, layers = _begin(producer, reader, readers=2, written=1)
    getting = other.submit("get", key="s", timeout=PATIENCE)
    until_requested(producer, 2)
    layer = reader.peer.submit("wait_layer", key="s", layer=1, timeout=PATIENCE)
    whole = reader.peer.submit("wait_stream", key="s", timeout=PATIENCE)
    wait_layer(reader, "s", 0)
    out.__exit__(ValueError, ValueError("out of luck"), None)
    mentions = ("layer 1 of branch 'kv'", "out of luck", "'s'")
    for waiting in (layer, whole, getting):
        error = expect(TransferFailed, waiting.result, PATIENCE, within=SLACK, mentions=mentions)
        assert error.key == "s"
    expect(TransferFailed, other.call, "get", key="s", timeout=5, mentions=("out of luck",))
    expect(ClosedError, write, out, layers, ("kv", 1))
    assert producer.stats()["memory"]["used"] > 0, "freed under a reader"
    reader.peer.call("release", key="s")


def check_missing_layer(rig: Rig) -> None:
    """A commit without all layers raises SchemaError, and its readers raise TransferFailed."""
    producer, reader = rig.serve(), rig.connect()
    out, layers = _begin(producer, reader)
    write(out, layers, ("kv", 0), ("kv", 2))
    whole = reader.peer.submit("wait_stream", key="s", timeout=PATIENCE)
    expect(SchemaError, out.commit, mentions=("layer 1 of branch 'kv'", "never written"))
    expect(TransferFailed, whole.result, PATIENCE, within=SLACK, mentions=("layer 1", "never"))
    reader.peer.call("release", key="s")


def check_wrong_layers_are_refused(rig: Rig) -> None:
    """A layer that is not in the plan is refused, and the stream goes on."""
    producer, here = rig.serve(), rig.connect_here()
    out, layers = begin(producer, THREE)
    key, value = layers["kv", 0]
    assert isinstance(key, torch.Tensor)
    assert isinstance(value, torch.Tensor)
    with here.stream_get("s", timeout=5) as stream:
        for call in (
            partial(out.write_layer, 3, key, value),
            partial(out.write_layer, -1, key, value),
            partial(out.write_layer, 0, key, value, branch="other"),
            partial(out.write_layer, 0, key),
            partial(out.write_layer, 0, key, value[:-1]),
            partial(out.write_layer, 0, key.view(torch.float16), value),
            partial(stream.wait_for_layer, 3),
            partial(stream.wait_for_layer, 0, branch="other"),
        ):
            expect(SchemaError, call)
            expect(TransferTimeout, stream.wait_for_layer, 0, timeout=0.0)
        write(out, layers)
        out.commit()
        assert fingerprint(stream.wait()) == fingerprint(THREE.make())


def check_abort_of_a_stream_by_the_producer(rig: Rig) -> None:
    """After an abort, the writer's next layer and every reader raise."""
    producer, reader = rig.serve(), rig.connect()
    out, layers = _begin(producer, reader)
    waiting = reader.peer.submit("wait_layer", key="s", layer=0, timeout=PATIENCE)
    producer.abort("s", "no longer needed")
    for call in (
        partial(waiting.result, PATIENCE),
        partial(write, out, layers, ("kv", 0)),
        partial(write, out, layers, ("kv", 1)),
        partial(reader.call, "stream_get", key="s", timeout=5),
    ):
        expect(TransferFailed, call, within=SLACK, mentions=("no longer needed",))
    out.fail("the writer left its block")
    reader.peer.call("release", key="s")


def check_abort_of_a_stream_by_the_reader(rig: Rig) -> None:
    """After an abort by a reader, the writer's next layer and every reader raise."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    out, layers = _begin(producer, reader, readers=2)
    getting = other.submit("get", key="s", timeout=PATIENCE)
    until_requested(producer, 2)
    waiting = reader.peer.submit("wait_layer", key="s", layer=2, timeout=PATIENCE)
    write(out, layers, ("kv", 0))
    reader.call("abort", key="s", reason="the user left")
    for future in (waiting, getting):
        error = expect(TransferFailed, future.result, PATIENCE, within=SLACK)
        assert error.reason == "the user left"
    expect(TransferFailed, write, out, layers, ("kv", 1), mentions=("the user left",))
    out.fail("the writer left its block")
    expect(TransferFailed, other.call, "get", key="s", timeout=5, mentions=("the user left",))
    reader.peer.call("release", key="s")


def check_an_aborted_writer_does_not_harm_the_next_payload(rig: Rig) -> None:
    """Its key was put again before the writer noticed the abort: that payload is not failed."""
    producer, reader = rig.serve(), rig.connect()
    out, layers = begin(producer, THREE)
    producer.abort("s", "begin again")
    data = Recipe("s", seed=8).make()
    receipt = producer.put(data)
    expect(TransferFailed, write, out, layers, ("kv", 0))
    out.__exit__(ValueError, ValueError("too late"), None)
    assert receipt.state == "committed"
    receive(reader, receipt, data)


def check_layer_times_out(rig: Rig) -> None:
    """Waiting for a layer ends at its deadline, the error names it, and the stream goes on."""
    producer, reader = rig.serve(), rig.connect()
    out, layers = begin(producer, THREE)
    reader.call("stream_get", key="s", timeout=0.2)
    for timeout in (0.0, 0.3, None):  # None: that of the stream
        waiting = reader.peer.submit("wait_layer", key="s", layer=1, timeout=timeout)
        within = (0.2 if timeout is None else timeout) + SLACK
        mentions = ("layer 1 of branch 'kv'", "'s'")
        error = expect(TransferTimeout, waiting.result, PATIENCE, within=within, mentions=mentions)
        assert error.key == "s"
        assert "still writing" in error.phase, error.phase
    whole = reader.peer.submit("wait_stream", key="s", timeout=0.1)
    expect(TransferTimeout, whole.result, PATIENCE, within=0.1 + SLACK, mentions=("commit",))
    write(out, layers)
    assert wait_layer(reader, "s", 1) == hash_tensors(layers["kv", 1])
    out.commit()
    finish(reader, THREE.make())
    out.commit().wait(timeout=5)


def check_reader_releases_an_unfinished_stream(rig: Rig) -> None:
    """A release before the commit does not harm the producer; the memory is free at the end."""
    producer, reader = rig.serve(), rig.connect()
    out, layers = _begin(producer, reader, written=1)
    reader.peer.call("release", key="s")
    until(lambda: producer.stats()["transfers"]["leased"] == 0, "it released the stream")
    write(out, layers, ("kv", 1), ("kv", 2))
    out.commit().wait(timeout=5)


def check_release_wakes_a_waiting_thread(rig: Rig) -> None:
    """A thread that waits for a layer raises when the stream is released by another."""
    producer, here = rig.serve(), rig.connect_here()
    out, layers = begin(producer, THREE)
    write(out, layers, ("kv", 0))
    stream = here.stream_get("s", timeout=5)
    kept = stream.wait_for_layer(0).key
    found: list[BaseException] = []
    thread = threading.Thread(target=lambda: found.append(_raised(stream)))
    thread.start()
    assert stream.delivery.progress is not None
    until(lambda: bool(stream.delivery.progress._waiting), "it waits")  # type: ignore[union-attr]
    stream.release()
    thread.join(SLACK)
    assert [type(error) for error in found] == [ClosedError], found
    expect(ClosedError, stream.wait_for_layer, 0, within=SLACK)
    assert hash_tensors([kept]) == hash_tensors([layers["kv", 0][0]])
    write(out, layers, ("kv", 1), ("kv", 2))
    receipt = out.commit()
    assert not receipt.done, "released while a view was held"
    del kept
    receipt.wait(timeout=5)


def check_a_failed_stream_keeps_no_memory(rig: Rig) -> None:
    """A failed stream that a reader drops is freed without the garbage collector."""
    producer, here = rig.serve(), rig.connect_here()
    gc.disable()
    try:
        for _ in range(2):
            _drop_a_failed_stream(producer, here)
        until_freed(producer)
    finally:
        gc.enable()


def check_producer_closes_in_a_stream(rig: Rig) -> None:
    """A waiting reader raises, the writer's next layer raises, and its block ends quietly."""
    producer, reader = rig.serve(), rig.connect()
    out, layers = _begin(producer, reader, written=1)
    waiting = reader.peer.submit("wait_layer", key="s", layer=1, timeout=PATIENCE)
    producer.close()
    expect(PeerLostError, waiting.result, PATIENCE, within=SLACK, mentions=("layer 1",))
    expect(ClosedError, write, out, layers, ("kv", 1))
    out.__exit__(ValueError, ValueError("of the user"), None)  # raises nothing of its own
    reader.peer.call("release", key="s")


def check_reader_closes_in_a_stream(rig: Rig) -> None:
    """Its waiting call raises, the layers that it has keep their bytes, the producer goes on."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect_here()
    out, layers = _begin(producer, reader, readers=2, written=1)
    waiting = reader.peer.submit("wait_layer", key="s", layer=1, timeout=PATIENCE)
    reader.call("close")
    expect(ClosedError, waiting.result, PATIENCE, within=SLACK, mentions=("layer 1",))
    with other.stream_get("s", timeout=5) as stream:
        write(out, layers, ("kv", 1), ("kv", 2))
        receipt = out.commit()
        assert fingerprint(stream.wait()) == fingerprint(THREE.make())
    reader.peer.call("release", key="s")
    receipt.wait(timeout=5)


def _raised(stream: ReceivedStream) -> BaseException:
    try:
        stream.wait_for_layer(1, timeout=PATIENCE)
    except KVLinkError as error:
        error.__traceback__ = None
        return error
    raise AssertionError("a layer came that was not written")


def _drop_a_failed_stream(producer: KVProducer, here: KVConsumer) -> None:
    out, layers = begin(producer, THREE)
    stream = here.stream_get("s", timeout=5)
    write(out, layers, ("kv", 0))
    stream.wait_for_layer(0)
    out.fail("no")
    with contextlib.suppress(TransferFailed):
        stream.wait_for_layer(1)
