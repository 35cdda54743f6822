"""Checks of streams: payloads that are read while they are written, to the end or to a failure."""

from __future__ import annotations

import contextlib
import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.errors import (
    ClosedError,
    DuplicateKeyError,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.testing.caches import Layers, Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import (
    Rig,
    deliver,
    expect,
    receive,
    request,
    until,
    until_freed,
)

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import KVConsumer, KVProducer, Payload, PutStream

THREE = Recipe("s", layers=3)


def begin(producer: KVProducer, recipe: Recipe, readers: int = 1) -> tuple[PutStream, Layers]:
    """Begin a stream; also returns the tensors of its layers."""
    data = recipe.make()
    return producer.stream_put(data, readers=readers), layers_of(data)


def write(out: PutStream, layers: Layers, *names: tuple[str, int]) -> None:
    """Write the named layers; all if none is named."""
    for branch, layer in names or layers:
        out.write_layer(layer, *layers[branch, layer], branch=branch)


def wait_layer(reader: RemoteLink, key: str, layer: int, timeout: float = 5, **options: Any) -> str:
    """Wait for a layer of the stream that a reader has; the hash of its tensors."""
    digest: str = reader.peer.call("wait_layer", key=key, layer=layer, timeout=timeout, **options)
    return digest


def write_all(
    out: PutStream, layers: Layers, reader: RemoteLink, key: str, command: str = "wait_layer"
) -> None:
    """Write every layer; the reader has it with every byte before the next one is written."""
    for (branch, layer), views in layers.items():
        write(out, layers, (branch, layer))
        digest = reader.peer.call(command, key=key, layer=layer, branch=branch, timeout=60)
        assert digest == hash_tensors(views), (key, branch, layer)


def finish(reader: RemoteLink, data: Payload, receipt: Receipt) -> None:
    """The reader of a committed stream has its whole payload, and releases it: it is delivered."""
    digest = reader.peer.call("wait_stream", key=data.request_id, timeout=60)
    assert digest == fingerprint(data), f"{data.request_id!r} arrived with other content"
    reader.peer.call("release", key=data.request_id)
    receipt.wait(timeout=60)


def check_layers_come_one_by_one(rig: Rig) -> None:
    """The reader gets each layer before the next one is written."""
    producer, reader = rig.serve(), rig.connect()
    recipe = Recipe("s", layers=4)
    out, layers = begin(producer, recipe)
    with out:
        assert reader.call("stream_get", key="s", timeout=60) == [list(name) for name in layers]
        for branch, layer in layers:
            waiting = reader.peer.submit("wait_layer", key="s", layer=layer, timeout=PATIENCE)
            expect(TransferTimeout, wait_layer, reader, "s", layer, timeout=0.0)
            assert not waiting.done(), "a layer came before it was written"
            write(out, layers, (branch, layer))
            assert waiting.result(PATIENCE) == hash_tensors(layers[branch, layer])
    receipt = out.commit()
    assert not receipt.done, "released while it is read"
    finish(reader, recipe.make(), receipt)


def check_every_byte_of_a_stream(rig: Rig) -> None:
    """Every byte of each layer and of the whole: odd sizes, latents, bundles, empty branches."""
    producer, reader = rig.serve(), rig.connect()
    for recipe in _RECIPES:
        _pass_through(producer, reader, recipe)


def check_every_byte_of_a_stream_without_digests(rig: Rig) -> None:
    """The same without digests."""
    producer, reader = rig.serve(digests=False), rig.connect()
    for recipe in _RECIPES:
        assert _pass_through(producer, reader, recipe).ledger.digests == "off"


def check_layers_in_any_order(rig: Rig) -> None:
    """Layers may be written and awaited in any order, but none may be written twice."""
    producer, reader = rig.serve(), rig.connect()
    recipe = Recipe("s", bundle=True, layers=3)
    out, layers = begin(producer, recipe)
    reader.call("stream_get", key="s", timeout=60)
    mentions = ("layer 0", "gen")
    expect(TransferTimeout, wait_layer, reader, "s", 0, 0.0, branch="gen", mentions=mentions)
    names = list(layers)
    for branch, layer in reversed(names):
        write(out, layers, (branch, layer))
        expect(SchemaError, write, out, layers, names[-1], mentions=("written already",))
        digest = wait_layer(reader, "s", layer, branch=branch)
        assert digest == hash_tensors(layers[branch, layer]), (branch, layer)
    finish(reader, recipe.make(), out.commit())


def check_stream_get_of_a_plain_put(rig: Rig) -> None:
    """A payload that was put is a stream whose layers have all been written."""
    producer, reader = rig.serve(), rig.connect()
    for recipe in (Recipe("whole"), Recipe("both", bundle=True)):
        data = recipe.make()
        receipt = producer.put(data)
        reader.call("stream_get", key=recipe.key, timeout=60)
        for (branch, layer), views in layers_of(data).items():
            assert wait_layer(reader, recipe.key, layer, 60, branch=branch) == hash_tensors(views)
        assert reader.peer.call("wait_stream", key=recipe.key, timeout=60) == fingerprint(data)
        reader.peer.call("release", key=recipe.key)
        receipt.wait(timeout=60)


def check_stream_get_before_a_plain_put(rig: Rig) -> None:
    """A waiting `stream_get` gets a payload that is put."""
    producer, reader = rig.serve(), rig.connect()
    waiting = request(reader, producer, "s", command="stream_get")
    receipt = producer.put(Recipe("s").make())
    waiting.result(PATIENCE)
    finish(reader, Recipe("s").make(), receipt)


def check_readers_wait_for_a_large_put(rig: Rig) -> None:
    """A large payload may be sent while it is copied; every reader gets it when it is whole."""
    producer = rig.serve(quota=64 << 20)
    *readers, streaming = [rig.connect(quota=128 << 20) for _ in range(3)]
    data = Recipe("s", layers=3, tokens=4096, heads=4, dim=256, dtype="uint8").make()
    gets = [reader.submit("get", key="s", timeout=PATIENCE, verify="full") for reader in readers]
    begun = request(streaming, producer, "s", requests=3, command="stream_get")
    receipt = producer.put(data, readers=3)
    for get in gets:
        assert get.result(PATIENCE) == fingerprint(data)
    begun.result(PATIENCE)
    finish(streaming, data, receipt)


def check_plain_get_of_a_stream(rig: Rig) -> None:
    """A plain get returns at the commit of a stream, whenever it was called."""
    producer, readers = rig.serve(), [rig.connect() for _ in range(3)]
    recipe = Recipe("s", layers=3)
    out, layers = begin(producer, recipe, readers=3)
    first_get = request(readers[0], producer, "s", verify="full")
    write(out, layers)
    second_get = request(readers[1], producer, "s", requests=2, verify="full")
    assert not first_get.done()
    assert not second_get.done()
    receipt = out.commit()
    for get in (
        first_get,
        second_get,
        readers[2].submit("get", key="s", timeout=60, verify="full"),
    ):
        assert get.result(PATIENCE) == fingerprint(recipe.make())
    receipt.wait(timeout=60)


def check_one_reader_streams_and_one_waits(rig: Rig) -> None:
    """One reader gets the layers, another one the whole payload at the commit."""
    producer, streaming, waiting = rig.serve(), rig.connect(), rig.connect()
    recipe = Recipe("s", layers=3)
    out, layers = begin(producer, recipe, readers=2)
    getting = waiting.submit("get", key="s", timeout=PATIENCE)
    streaming.call("stream_get", key="s", timeout=60)
    write_all(out, layers, streaming, "s")
    assert not getting.done()
    receipt = out.commit()
    assert getting.result(PATIENCE) == fingerprint(recipe.make())
    assert not receipt.done, "the streaming reader still has it"
    streaming.peer.call("release", key="s")
    receipt.wait(timeout=60)


def check_late_reader_of_a_stream(rig: Rig) -> None:
    """A late reader gets the earlier layers at once, and the others as they come."""
    producer, first, consumer = rig.serve(), rig.connect(), rig.connect_here()
    out, layers = begin(producer, Recipe("s", layers=4), readers=2)
    names = list(layers)
    first.call("stream_get", key="s", timeout=60)
    write(out, layers, *names[:2])
    with consumer.stream_get("s", timeout=60) as stream:
        for branch, layer in names[:2]:
            received = stream.wait_for_layer(layer, timeout=60)
            assert hash_tensors(received.tensors) == hash_tensors(layers[branch, layer])
        del received
        expect(TransferTimeout, stream.wait_for_layer, 2, timeout=0.0)
        write(out, layers, *names[2:])
        out.commit()
        assert [layer.index for layer in stream] == [layer for _, layer in names]
    first.peer.call("release", key="s")
    out.commit().wait(timeout=60)


def check_one_stream_get_too_many(rig: Rig) -> None:
    """A reader beyond those declared gets nothing of a stream, and its key is in use."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect_here()
    out, layers = begin(producer, Recipe("s"))
    reader.call("stream_get", key="s", timeout=60)
    expect(TransferTimeout, other.stream_get, "s", timeout=0.1)
    expect(DuplicateKeyError, producer.stream_put, Recipe("s").make(), mentions=("'s'",))
    write(out, layers)
    reader.peer.call("release", key="s")
    out.commit().wait(timeout=60)


def check_key_of_a_stream_is_reusable(rig: Rig) -> None:
    """After a stream was committed or failed, its key can be used for another payload."""
    producer, reader = rig.serve(), rig.connect()
    for seed in range(3):
        recipe = Recipe("again", seed=seed)
        _pass_through(producer, reader, recipe)
        out, _ = begin(producer, Recipe("again", seed=9))
        out.fail("not this one")
        deliver(producer, reader, recipe.make())


def _begin(
    producer: KVProducer, reader: RemoteLink, *, readers: int = 1, written: int = 0
) -> tuple[PutStream, Layers]:
    """Begin a stream of `THREE` that a reader has, with the first layers written and received."""
    out, layers = begin(producer, THREE, readers=readers)
    reader.call("stream_get", key="s", timeout=60)
    for layer in range(written):
        write(out, layers, ("kv", layer))
        wait_layer(reader, "s", layer)
    return out, layers


def check_failing_writer(rig: Rig) -> None:
    """An error in the writer's block wakes every reader, whatever it waits for."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    out, layers = _begin(producer, reader, readers=2, written=1)
    getting = request(other, producer, "s", requests=2)
    layer = reader.peer.submit("wait_layer", key="s", layer=1, timeout=PATIENCE)
    completion = reader.peer.submit("wait_stream", key="s", timeout=PATIENCE)
    wait_layer(reader, "s", 0)
    out.__exit__(ValueError, ValueError("out of luck"), None)
    mentions = ("layer 1 of branch 'kv'", "out of luck", "'s'")
    for waiting in (layer, completion, getting):
        error = expect(TransferFailed, waiting.result, PATIENCE, mentions=mentions)
        assert error.key == "s"
    expect(TransferFailed, other.call, "get", key="s", timeout=60, mentions=("out of luck",))
    expect(ClosedError, write, out, layers, ("kv", 1))
    assert producer.stats()["memory"]["used"] > 0, "freed under a reader"
    reader.peer.call("release", key="s")


def check_missing_layer(rig: Rig) -> None:
    """A commit without all layers raises SchemaError, and its readers raise TransferFailed."""
    producer, reader = rig.serve(), rig.connect()
    out, layers = _begin(producer, reader)
    write(out, layers, ("kv", 0), ("kv", 2))
    completion = reader.peer.submit("wait_stream", key="s", timeout=PATIENCE)
    expect(SchemaError, out.commit, mentions=("layer 1 of branch 'kv'", "never written"))
    expect(TransferFailed, completion.result, PATIENCE, mentions=("layer 1", "never"))
    reader.peer.call("release", key="s")


def check_wrong_layers_are_refused(rig: Rig) -> None:
    """A layer that is not in the plan is refused, and the stream goes on."""
    producer, consumer = rig.serve(), rig.connect_here()
    out, layers = begin(producer, THREE)
    key, value = layers["kv", 0]
    assert isinstance(key, torch.Tensor)
    assert isinstance(value, torch.Tensor)
    with consumer.stream_get("s", timeout=60) as stream:
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
        partial(reader.call, "stream_get", key="s", timeout=60),
    ):
        expect(TransferFailed, call, mentions=("no longer needed",))
    out.fail("the writer left its block")
    reader.peer.call("release", key="s")


def check_abort_of_a_stream_by_the_reader(rig: Rig) -> None:
    """After an abort by a reader, the writer's next layer and every reader raise."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    out, layers = _begin(producer, reader, readers=2)
    getting = request(other, producer, "s", requests=2)
    waiting = reader.peer.submit("wait_layer", key="s", layer=2, timeout=PATIENCE)
    write(out, layers, ("kv", 0))
    reader.call("abort", key="s", reason="the user left")
    for future in (waiting, getting):
        error = expect(TransferFailed, future.result, PATIENCE)
        assert error.reason == "the user left"
    expect(TransferFailed, write, out, layers, ("kv", 1), mentions=("the user left",))
    out.fail("the writer left its block")
    expect(TransferFailed, other.call, "get", key="s", timeout=60, mentions=("the user left",))
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
    _stream_get_with_a_short_timeout(reader, "s")
    for timeout in (0.0, 0.3, None):  # None: that of the stream
        waiting = reader.peer.submit("wait_layer", key="s", layer=1, timeout=timeout)
        mentions = ("layer 1 of branch 'kv'", "'s'")
        error = expect(TransferTimeout, waiting.result, PATIENCE, mentions=mentions)
        assert error.key == "s"
        assert "still writing" in error.phase, error.phase
    completion = reader.peer.submit("wait_stream", key="s", timeout=0.1)
    expect(TransferTimeout, completion.result, PATIENCE, mentions=("commit",))
    write(out, layers)
    assert wait_layer(reader, "s", 1) == hash_tensors(layers["kv", 1])
    finish(reader, THREE.make(), out.commit())


def check_reader_releases_an_unfinished_stream(rig: Rig) -> None:
    """A release before the commit does not harm the producer; the memory is free at the end."""
    producer, reader = rig.serve(), rig.connect()
    out, layers = _begin(producer, reader, written=1)
    reader.peer.call("release", key="s")
    until(lambda: producer.stats()["transfers"]["leased"] == 0, "it released the stream")
    write(out, layers, ("kv", 1), ("kv", 2))
    out.commit().wait(timeout=60)


def check_release_wakes_a_waiting_thread(rig: Rig) -> None:
    """A thread that waits for a layer raises when the stream is released by another."""
    producer, consumer = rig.serve(), rig.connect_here()
    out, layers = begin(producer, THREE)
    write(out, layers, ("kv", 0))
    stream = consumer.stream_get("s", timeout=60)
    kept = stream.wait_for_layer(0).key
    pool = ThreadPoolExecutor(1)
    waiting = pool.submit(stream.wait_for_layer, 1, timeout=PATIENCE)
    pool.shutdown(wait=False)
    assert stream.delivery.progress is not None
    until(lambda: bool(stream.delivery.progress._waiting), "it waits")  # type: ignore[union-attr]
    stream.release()
    expect(ClosedError, waiting.result, PATIENCE)
    expect(ClosedError, stream.wait_for_layer, 0)
    assert hash_tensors([kept]) == hash_tensors([layers["kv", 0][0]])
    write(out, layers, ("kv", 1), ("kv", 2))
    receipt = out.commit()
    assert not receipt.done, "released while a view was held"
    del kept
    receipt.wait(timeout=60)


def check_a_failed_stream_keeps_no_memory(rig: Rig) -> None:
    """A failed stream that a reader drops is freed without the garbage collector."""
    producer, consumer = rig.serve(), rig.connect_here()
    gc.disable()
    try:
        for _ in range(2):
            _drop_a_failed_stream(producer, consumer)
        until_freed(producer)
    finally:
        gc.enable()


def check_producer_closes_in_a_stream(rig: Rig) -> None:
    """A waiting reader raises, the writer's next layer raises, and its block ends quietly."""
    producer, reader = rig.serve(), rig.connect()
    out, layers = _begin(producer, reader, written=1)
    waiting = reader.peer.submit("wait_layer", key="s", layer=1, timeout=PATIENCE)
    producer.close()
    expect(PeerLostError, waiting.result, PATIENCE, mentions=("layer 1",))
    expect(ClosedError, write, out, layers, ("kv", 1))
    out.__exit__(ValueError, ValueError("of the user"), None)  # raises nothing of its own
    reader.peer.call("release", key="s")


def check_reader_closes_in_a_stream(rig: Rig) -> None:
    """Its waiting call raises, the layers that it has keep their bytes, the producer goes on."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect_here()
    out, layers = _begin(producer, reader, readers=2, written=1)
    waiting = reader.peer.submit("wait_layer", key="s", layer=1, timeout=PATIENCE)
    reader.call("close")
    expect(ClosedError, waiting.result, PATIENCE, mentions=("layer 1",))
    with other.stream_get("s", timeout=60) as stream:
        write(out, layers, ("kv", 1), ("kv", 2))
        receipt = out.commit()
        assert fingerprint(stream.wait()) == fingerprint(THREE.make())
    reader.peer.call("release", key="s")
    receipt.wait(timeout=60)


def _stream_get_with_a_short_timeout(reader: RemoteLink, key: str) -> None:
    """Call `stream_get` with the shortest timeout in which this machine answers."""
    for timeout in (0.2, 1.0, 5.0):
        with contextlib.suppress(TransferTimeout):
            reader.call("stream_get", key=key, timeout=timeout)
            return
    reader.call("stream_get", key=key, timeout=60)


def _drop_a_failed_stream(producer: KVProducer, consumer: KVConsumer) -> None:
    out, layers = begin(producer, THREE)
    stream = consumer.stream_get("s", timeout=60)
    write(out, layers, ("kv", 0))
    stream.wait_for_layer(0)
    out.fail("no")
    with contextlib.suppress(TransferFailed):
        stream.wait_for_layer(1)


def _pass_through(producer: KVProducer, reader: RemoteLink, recipe: Recipe) -> PutStream:
    """Send a payload as a stream to one reader; the stream, whose receipt is done."""
    out, layers = begin(producer, recipe)
    reader.call("stream_get", key=recipe.key, timeout=60)
    write_all(out, layers, reader, recipe.key)
    finish(reader, recipe.make(), out.commit())
    return out


_RECIPES = (
    Recipe("odd", layers=3, tokens=7, heads=3, dim=5, dtype="float16"),
    Recipe("latent", layers=2, tokens=9, dim=33, latent=True),
    Recipe("bundle", bundle=True, tokens=9, dtype="float32"),
    Recipe("latents", bundle=True, tokens=3, dim=7, dtype="uint8", latent=True),
    Recipe("empty", layers=3, tokens=0),
    Recipe("over a chunk", layers=2, tokens=1025, heads=4, dim=128, dtype="bfloat16"),
)
