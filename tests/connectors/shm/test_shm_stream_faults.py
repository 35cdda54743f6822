"""Real processes, killed and frozen during a stream: every survivor gets layers or an error."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import PeerLostError, TransferFailed, TransferTimeout
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.peer_harness import PATIENCE, PeerExited, RemoteLink
from omni_kvlink.testing.rig import expect, until, until_freed
from support.faults.frozen import freeze
from support.faults.harness import Field, Start, kill

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("leaves_nothing")

RECIPE = Recipe("s", layers=3)
LAYERS = {layer: hash_tensors(tensors) for (_, layer), tensors in layers_of(RECIPE.make()).items()}


@pytest.fixture
def field(socket_dir: str, request: pytest.FixtureRequest) -> Iterator[Field]:
    field = Field(socket_dir, getattr(request, "param", "pooled"))
    yield field
    field.close()


BOTH_MODES = pytest.mark.parametrize("field", ["pooled", "sealed"], indirect=True)


def layer(reader: RemoteLink, index: int, timeout: float = 60) -> str:
    found: str = reader.peer.call("wait_layer", key="s", layer=index, timeout=timeout)
    return found


@BOTH_MODES
def test_producer_killed_between_layers(field: Field, start: Start) -> None:
    """Waiting calls fail at once; a layer that a reader holds stays unchanged."""
    target = start()
    producer, reader, other = field.serve_at(target), field.connect(), field.connect()
    producer.call("stream_put", recipe=RECIPE.to_dict(), readers=2)
    reader.call("stream_get", key="s", timeout=60)
    getting = other.submit("get", key="s", timeout=PATIENCE)
    target.call("write", key="s", layer=0)
    assert layer(reader, 0) == LAYERS[0]
    tensor = field.commands.kept["s"].wait_for_layer(0).key
    waiting = [
        reader.peer.submit("wait_layer", key="s", layer=1, timeout=PATIENCE),
        reader.peer.submit("wait_stream", key="s", timeout=PATIENCE),
        getting,
    ]
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    before = hash_tensors([tensor])
    kill(target)
    for future in waiting:
        expect(PeerLostError, partial(future.result, PATIENCE))
    expect(PeerLostError, lambda: layer(reader, 2), mentions=("layer 2",))
    assert hash_tensors([tensor]) == before
    del tensor
    reader.peer.call("release", key="s")


def test_producer_killed_in_a_layer(field: Field, start: Start) -> None:
    target = start({"stream.layer": "kill"})
    producer, reader = field.serve_at(target), field.connect()
    producer.call("stream_put", recipe=RECIPE.to_dict())
    reader.call("stream_get", key="s", timeout=60)
    waiting = reader.peer.submit("wait_layer", key="s", layer=0, timeout=PATIENCE)
    dying = target.submit("write", key="s", layer=0)
    target.process.wait(PATIENCE)
    expect(PeerLostError, lambda: waiting.result(PATIENCE), mentions=("layer 0",))
    expect(PeerExited, lambda: dying.result(PATIENCE))
    reader.peer.call("release", key="s")


@pytest.mark.parametrize("point", ["put.encoded", "publish.before"])
def test_producer_killed_at_the_commit(field: Field, start: Start, point: str) -> None:
    """Every layer arrived, but the commit did not."""
    target = start({point: "kill"})
    producer, reader = field.serve_at(target), field.connect()
    producer.call("stream_put", recipe=RECIPE.to_dict())
    reader.call("stream_get", key="s", timeout=60)
    for index, found in LAYERS.items():
        target.call("write", key="s", layer=index)
        assert layer(reader, index) == found
    whole = reader.peer.submit("wait_stream", key="s", timeout=PATIENCE)
    target.submit("commit", key="s")
    target.process.wait(PATIENCE)
    expect(PeerLostError, lambda: whole.result(PATIENCE), mentions=("commit",))
    reader.peer.call("release", key="s")


def test_writer_fails_in_a_layer(field: Field, start: Start) -> None:
    target = start({"stream.layer": "raise"})
    producer, reader = field.serve_at(target), field.connect()
    producer.call("stream_put", recipe=RECIPE.to_dict())
    reader.call("stream_get", key="s", timeout=60)
    with pytest.raises(Exception, match="fault armed"):
        target.call("write", key="s", layer=0)
    target.call("fail_stream", key="s", reason="it was armed")
    fields = ("layer 0 of branch 'kv'", "it was armed")
    expect(TransferFailed, lambda: layer(reader, 0), mentions=fields)
    reader.peer.call("release", key="s")
    until(lambda: producer.call("stats")["memory"]["used"] == 0, "the memory is back")


@BOTH_MODES
@pytest.mark.parametrize("point", ["", "get.mapped"])
def test_reader_killed_amid_a_stream(field: Field, start: Start, point: str) -> None:
    """The next reader gets all layers, the earlier ones too; the writer is not affected."""
    target = start({point: "kill"} if point else None)
    producer, dying, reader = field.serve(), field.connect_at(target), field.connect()
    data = RECIPE.make()
    layers = layers_of(data)
    with producer.stream_put(data) as out:
        out.write_layer(0, *layers["kv", 0])
        taken = dying.submit("stream_get", key="s", timeout=60)
        if point:
            target.process.wait(PATIENCE)
            expect(PeerExited, lambda: taken.result(PATIENCE))
        else:
            taken.result(PATIENCE)
            assert layer(dying, 0) == LAYERS[0]
        waiting = reader.submit("stream_get", key="s", timeout=PATIENCE)
        if not point:
            until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
            kill(target)
        waiting.result(PATIENCE)
        assert layer(reader, 0) == LAYERS[0]
        for index in (1, 2):
            out.write_layer(index, *layers["kv", index])
            assert layer(reader, index) == LAYERS[index]
    assert reader.peer.call("wait_stream", key="s", timeout=60) == fingerprint(data)
    reader.peer.call("release", key="s")
    out.commit().wait(timeout=60)
    assert producer.stats()["transfers"]["redelivered"] == 1
    until_freed(producer)


def test_reader_killed_and_a_plain_get_comes(field: Field, start: Start) -> None:
    target = start()
    producer, dying, reader = field.serve(), field.connect_at(target), field.connect()
    data = RECIPE.make()
    layers = layers_of(data)
    with producer.stream_put(data) as out:
        dying.call("stream_get", key="s", timeout=60)
        for index in LAYERS:
            out.write_layer(index, *layers["kv", index])
    kill(target)
    assert reader.call("get", key="s", timeout=60, verify="full") == fingerprint(data)
    out.commit().wait(timeout=60)
    until_freed(producer)


def test_frozen_writer(field: Field, start: Start) -> None:
    """No wait exceeds its deadline, and the stream continues when the writer does."""
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    producer.call("stream_put", recipe=RECIPE.to_dict())
    reader.call("stream_get", key="s", timeout=60)
    target.call("write", key="s", layer=0)
    assert layer(reader, 0) == LAYERS[0]
    freeze(target.process.pid)
    writing = target.submit("write", key="s", layer=1)
    expect(TransferTimeout, lambda: layer(reader, 1, 0.3), mentions=("layer 1",))
    os.kill(target.process.pid, signal.SIGCONT)
    assert layer(reader, 1) == LAYERS[1]
    writing.result(PATIENCE)
    target.call("write", key="s", layer=2)
    target.call("commit", key="s")
    assert reader.peer.call("wait_stream", key="s", timeout=60) == fingerprint(RECIPE.make())
    reader.peer.call("release", key="s")
    target.call("wait", key="s", timeout=60)


def test_frozen_reader(field: Field, start: Start) -> None:
    """It does not block the writer or another reader, and gets every layer when it continues."""
    target = start()
    producer, frozen, reader = field.serve(), field.connect_at(target), field.connect()
    data = RECIPE.make()
    layers = layers_of(data)
    with producer.stream_put(data, readers=2) as out:
        frozen.call("stream_get", key="s", timeout=60)
        reader.call("stream_get", key="s", timeout=60)
        freeze(target.process.pid)
        for index, found in LAYERS.items():
            out.write_layer(index, *layers["kv", index])
            assert layer(reader, index) == found
    receipt = out.commit()
    assert reader.peer.call("wait_stream", key="s", timeout=60) == fingerprint(data)
    reader.peer.call("release", key="s")
    assert not receipt.done
    os.kill(target.process.pid, signal.SIGCONT)
    assert target.call("wait_stream", key="s", timeout=60) == fingerprint(data)
    target.call("release", key="s")
    receipt.wait(timeout=60)
    until_freed(producer)


def test_both_killed_amid_a_stream(field: Field, start: Start) -> None:
    """The next producer of the name has no state of the killed one."""
    one, two = start(), start()
    producer, reader = field.serve_at(one), field.connect_at(two)
    producer.call("stream_put", recipe=RECIPE.to_dict())
    reader.call("stream_get", key="s", timeout=60)
    one.call("write", key="s", layer=0)
    kill(two)
    kill(one)
    again, here = field.serve(), field.connect()
    expect(
        TransferTimeout,
        lambda: here.call("stream_get", key="s", timeout=0.1),
        mentions=("not announced",),
    )
    receipt = again.put(RECIPE.make())
    assert here.call("get", key="s", timeout=60) == fingerprint(RECIPE.make())
    receipt.wait(timeout=60)
