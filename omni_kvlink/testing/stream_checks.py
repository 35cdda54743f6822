"""Checks of streams: payloads that are read while they are written, to the end or to a failure."""

from __future__ import annotations

import contextlib
import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.errors import (
    ClosedError,
    DuplicateKeyError,
    IntegrityError,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
    without_frames,
)
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import MIXED, NESTED, Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import (
    Rig,
    aborts,
    deliver,
    expect,
    receive,
    request,
    until,
    until_freed,
)
from omni_kvlink.testing.tampering import TamperingCopier, flip_bit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import KVConsumer, KVProducer, Payload, ReceivedStream

THREE = Recipe("s", layers=3)
RECIPES = (
    Recipe("odd", layers=3, tokens=7, heads=3, dim=5, dtype="float16"),
    Recipe("latent", layers=2, tokens=9, dim=33, latent=True),
    Recipe("bundle", bundle=True, tokens=9, dtype="float32"),
    Recipe("latents", bundle=True, tokens=3, dim=7, dtype="uint8", latent=True),
    Recipe("empty", layers=3, tokens=0),
    Recipe("over a chunk", layers=2, tokens=1025, heads=4, dim=128, dtype="bfloat16"),
    NESTED,
    MIXED,
)


class LayerStream:
    """A payload that is sent layer by layer; `reader`, one of the peer, receives it.

    It begins with so many layers of a cache `written` and received.
    """

    def __init__(
        self,
        producer: KVProducer,
        reader: RemoteLink | None = None,
        data: Payload | None = None,
        *,
        readers: int = 1,
        written: int = 0,
    ):
        self.data = THREE.make() if data is None else data
        self.layers = layers_of(self.data)
        self.out = producer.stream_put(self.data, readers=readers)
        if reader is not None:
            self.reader = reader
            names = reader.call("stream_get", key=self.data.request_id, timeout=60)
            assert names == [list(name) for name in self.layers]
        for layer in range(written):
            self.write(("kv", layer))
            assert self.wait(layer) == self.hash("kv", layer)

    def write(self, *names: tuple[str, int]) -> None:
        """Write the named layers; all if none is named."""
        for branch, layer in names or self.layers:
            self.out.write_layer(layer, *self.layers[branch, layer], branch=branch)

    def hash(self, branch: str, layer: int) -> str:
        """The hash of the tensors of a layer."""
        return hash_tensors(self.layers[branch, layer])

    def begin(self, command: str, timeout: float | None = PATIENCE, **options: Any) -> Future[Any]:
        """Begin to wait in the peer: `wait_layer`, `scatter_layer` or `wait_stream`."""
        key = self.data.request_id
        return self.reader.peer.submit(command, key=key, timeout=timeout, **options)

    def wait(self, layer: int, timeout: float = 60, **options: Any) -> Any:
        """Wait for a layer in the peer; the hash of its tensors."""
        return self.begin("wait_layer", timeout, layer=layer, **options).result(PATIENCE)

    def pass_through(self, expected: Payload | None = None, command: str = "wait_layer") -> None:
        """Write each layer, which the reader has, with every byte, before the next; commit."""
        for branch, layer in self.layers:
            waiting = self.begin(command, layer=layer, branch=branch)
            expect(TransferTimeout, self.wait, layer, 0.0, branch=branch)
            assert not waiting.done(), "a layer came before it was written"
            self.write((branch, layer))
            assert waiting.result(PATIENCE) == self.hash(branch, layer), (branch, layer)
        finish(self.reader, expected or self.data, self.out.commit())


def finish(reader: RemoteLink, data: Payload, receipt: Receipt) -> None:
    """The reader of a committed stream has its whole payload, and releases it: it is delivered."""
    key = data.request_id
    digest = reader.peer.call("wait_stream", key=key, timeout=60)
    assert digest == fingerprint(data), f"{key!r} arrived with other content"
    assert not receipt.done, "released while it is read"
    reader.peer.call("release", key=key)
    receipt.wait(timeout=60)


def check_layers_come_one_by_one(rig: Rig) -> None:
    """The reader has each layer, with every byte, before the next one is written, or copies it out.

    Odd sizes, latents, bundles, nested tensors, empty branches; with digests and without.
    """
    for digests in (True, False):
        producer, reader = rig.serve(digests=digests), rig.connect()
        for recipe in RECIPES:
            stream = LayerStream(producer, reader, recipe.make())
            stream.pass_through()
            assert digests or stream.out.ledger.digests == "off"
        LayerStream(producer, reader, MIXED.make()).pass_through(command="scatter_layer")
        until_freed(producer)
        producer.close()


def check_layers_in_any_order(rig: Rig) -> None:
    """Layers may be written and awaited in any order, but none may be written twice."""
    producer, reader = rig.serve(), rig.connect()
    stream = LayerStream(producer, reader, Recipe("s", bundle=True, layers=3).make())
    expect(TransferTimeout, stream.wait, 0, 0.0, branch="gen", mentions=("layer 0", "gen"))
    names = list(stream.layers)
    for branch, layer in reversed(names):
        stream.write((branch, layer))
        expect(SchemaError, stream.write, names[-1], mentions=("written already",))
        assert stream.wait(layer, branch=branch) == stream.hash(branch, layer), (branch, layer)
    finish(reader, stream.data, stream.out.commit())


def check_stream_get_of_a_plain_put(rig: Rig) -> None:
    """A payload that was put is a stream whose layers have all been written; also if it waits."""
    producer, reader = rig.serve(), rig.connect()
    for recipe in (Recipe("s"), Recipe("s", bundle=True)):
        data = recipe.make()
        waiting = request(reader, producer, "s", command="stream_get")
        receipt = producer.put(data)
        waiting.result(PATIENCE)
        finish(reader, data, receipt)
        receipt = producer.put(data)
        reader.call("stream_get", key="s", timeout=60)
        for (branch, layer), views in layers_of(data).items():
            wait = partial(reader.peer.call, "wait_layer", key="s", timeout=60)
            assert wait(layer=layer, branch=branch) == hash_tensors(views)
        finish(reader, data, receipt)


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
    """A plain get returns at the commit, whenever it was called; another reader has the layers."""
    producer, streaming, readers = rig.serve(), rig.connect(), [rig.connect() for _ in range(3)]
    stream = LayerStream(producer, streaming, readers=4)
    gets = [request(readers[0], producer, "s", requests=2, verify="full")]
    for name in stream.layers:
        stream.write(name)
        assert stream.wait(name[1]) == stream.hash(*name)
    gets.append(request(readers[1], producer, "s", requests=3, verify="full"))
    assert not any(get.done() for get in gets)
    receipt = stream.out.commit()
    gets.append(readers[2].submit("get", key="s", timeout=60, verify="full"))
    for get in gets:
        assert get.result(PATIENCE) == fingerprint(stream.data)
    assert not receipt.done, "the streaming reader still has it"
    finish(streaming, stream.data, receipt)


def check_late_reader_of_a_stream(rig: Rig) -> None:
    """A late reader gets the earlier layers at once, and the others as they come."""
    producer, reader, consumer = rig.serve(), rig.connect(), rig.connect_here()
    late = LayerStream(producer, reader, Recipe("s", layers=4).make(), readers=2, written=2)
    with consumer.stream_get("s", timeout=60) as stream:
        for layer in range(2):
            received = stream.wait_for_layer(layer, timeout=60)
            assert hash_tensors(received.tensors) == late.hash("kv", layer)
        del received
        expect(TransferTimeout, stream.wait_for_layer, 2, timeout=0.0)
        late.write(("kv", 2), ("kv", 3))
        late.out.commit()
        assert [layer.index for layer in stream] == list(range(4))
    finish(reader, late.data, late.out.commit())


def check_metadata_at_the_end(rig: Rig) -> None:
    """Every reader gets the metadata given to `finish`, early or late; before the end it is empty.

    What `stream_put` said is there from the start.
    """
    producer, reader = rig.serve(), rig.connect()
    waiting, late, here = rig.connect(), rig.connect(), rig.connect_here()
    extra = {"first token": 17, "finish reason": "stop", "nested": {"é": [1, None, 0.5]}}
    for recipe in (THREE, Recipe("s", bundle=True, layers=2), Recipe("s", tokens=2000, heads=8)):
        stream = LayerStream(producer, reader, recipe.make(), readers=4)
        about = partial(reader.peer.call, "stream_metadata", key="s")
        lens = {branch.name: list(branch.kv_lens) for branch in stream.out.manifest.branches}
        found, before = about()
        assert {name: list(each) for name, each in found.items()} == lens
        assert before == {}
        get = request(waiting, producer, "s", requests=2, command="get_extra")
        stream.write()
        expect(SchemaError, stream.out.finish, {"long": "x" * 5000}, mentions=("limit is 4096",))
        expect(SchemaError, stream.out.finish, {"not JSON": {1}}, mentions=("extra",))
        receipt = stream.out.finish(extra)
        expect(ClosedError, stream.out.finish, extra)
        assert stream.out.commit() is receipt
        assert get.result(PATIENCE) == extra
        assert late.call("get_extra", key="s", timeout=60) == extra
        with here.stream_get("s", timeout=60) as last:
            last.wait(timeout=60)
            assert last.extra == extra
            assert not hasattr(last.extra, "__setitem__"), "it can be modified"
        assert reader.peer.call("wait_stream", key="s", timeout=60) == fingerprint(stream.data)
        assert about()[1] == extra
        reader.peer.call("release", key="s")
        receipt.wait(timeout=60)
    producer.put(THREE.make())
    assert reader.call("get_extra", key="s", timeout=60) == {}


def check_one_stream_get_too_many(rig: Rig) -> None:
    """A reader beyond those declared gets nothing of a stream, and its key is in use."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect_here()
    stream = LayerStream(producer, reader)
    expect(TransferTimeout, other.stream_get, "s", timeout=0.1)
    expect(DuplicateKeyError, producer.stream_put, stream.data, mentions=("'s'",))
    stream.write()
    finish(reader, stream.data, stream.out.commit())


def check_key_of_a_stream_is_reusable(rig: Rig) -> None:
    """After a stream was committed or failed, its key can be used for another payload."""
    producer, reader = rig.serve(), rig.connect()
    for seed in range(3):
        data = Recipe("again", seed=seed).make()
        LayerStream(producer, reader, data).pass_through()
        LayerStream(producer, data=Recipe("again", seed=9).make()).out.fail("not this one")
        deliver(producer, reader, data)


def check_failing_writer(rig: Rig) -> None:
    """An error in the writer's block wakes every reader, whatever it waits for."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    stream = LayerStream(producer, reader, readers=2, written=1)
    waiting = [
        request(other, producer, "s", requests=2),
        stream.begin("wait_layer", layer=1),
        stream.begin("wait_stream"),
    ]
    stream.wait(0)
    stream.out.__exit__(ValueError, ValueError("out of luck"), None)
    mentions = ("layer 1 of branch 'kv'", "out of luck", "'s'")
    for future in waiting:
        error = expect(TransferFailed, future.result, PATIENCE, mentions=mentions)
        assert error.key == "s"
    expect(TransferFailed, other.call, "get", key="s", timeout=60, mentions=("out of luck",))
    expect(ClosedError, stream.write, ("kv", 1))
    assert producer.stats()["memory"]["used"] > 0, "freed under a reader"


def check_missing_layer(rig: Rig) -> None:
    """A commit without all layers raises SchemaError, and its readers raise TransferFailed."""
    stream = LayerStream(rig.serve(), rig.connect())
    stream.write(("kv", 0), ("kv", 2))
    completion = stream.begin("wait_stream")
    expect(SchemaError, stream.out.commit, mentions=("layer 1 of branch 'kv'", "never written"))
    expect(TransferFailed, completion.result, PATIENCE, mentions=("layer 1", "never"))


def check_abort_of_a_stream(rig: Rig) -> None:
    """After an abort by either side, the writer's next layer and every reader raise."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    for abort in aborts(producer, reader):
        stream = LayerStream(producer, reader, readers=2)
        waiting = [request(other, producer, "s", requests=2), stream.begin("wait_layer", layer=2)]
        stream.write(("kv", 0))
        abort("s", "the user left")
        for future in waiting:
            error = expect(TransferFailed, future.result, PATIENCE)
            assert error.reason == "the user left"
        mentions = ("the user left",)
        expect(TransferFailed, stream.write, ("kv", 1), mentions=mentions)
        expect(TransferFailed, stream.write, ("kv", 2), mentions=mentions)
        expect(TransferFailed, reader.call, "stream_get", key="s", timeout=60, mentions=mentions)
        stream.out.fail("the writer left its block")
        expect(TransferFailed, other.call, "get", key="s", timeout=60, mentions=mentions)
        reader.peer.call("release", key="s")


def check_an_aborted_writer_does_not_harm_the_next_payload(rig: Rig) -> None:
    """Its key was put again before the writer noticed the abort: that payload is not failed."""
    producer, reader = rig.serve(), rig.connect()
    stream = LayerStream(producer)
    producer.abort("s", "begin again")
    data = Recipe("s", seed=8).make()
    receipt = producer.put(data)
    expect(TransferFailed, stream.write, ("kv", 0))
    stream.out.__exit__(ValueError, ValueError("too late"), None)
    assert receipt.state == "committed"
    receive(reader, receipt, data)


def check_layer_times_out(rig: Rig) -> None:
    """Waiting for a layer ends at its deadline, the error names it, and the stream goes on."""
    producer, reader = rig.serve(), rig.connect()
    stream = LayerStream(producer)
    stream.reader = reader
    for timeout in (0.2, 1.0, 5.0, 60.0):  # the shortest in which this machine answers
        with contextlib.suppress(TransferTimeout):
            reader.call("stream_get", key="s", timeout=timeout)
            break
    for seconds in (0.0, 0.3, None):  # None: that of the stream
        waiting = stream.begin("wait_layer", seconds, layer=1)
        mentions = ("layer 1 of branch 'kv'", "'s'")
        error = expect(TransferTimeout, waiting.result, PATIENCE, mentions=mentions)
        assert error.key == "s"
        assert "still writing" in error.phase, error.phase
    completion = stream.begin("wait_stream", 0.1)
    expect(TransferTimeout, completion.result, PATIENCE, mentions=("commit",))
    stream.write()
    assert stream.wait(1) == stream.hash("kv", 1)
    finish(reader, stream.data, stream.out.commit())


def check_reader_releases_an_unfinished_stream(rig: Rig) -> None:
    """A release before the commit does not harm the producer; the memory is free at the end."""
    producer, reader = rig.serve(), rig.connect()
    stream = LayerStream(producer, reader, written=1)
    reader.peer.call("release", key="s")
    until(lambda: producer.stats()["transfers"]["leased"] == 0, "it released the stream")
    stream.write(("kv", 1), ("kv", 2))
    stream.out.commit().wait(timeout=60)


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


def _drop_a_failed_stream(producer: KVProducer, consumer: KVConsumer) -> None:
    failing = LayerStream(producer)
    stream = consumer.stream_get("s", timeout=60)
    failing.write(("kv", 0))
    stream.wait_for_layer(0)
    failing.out.fail("no")
    with contextlib.suppress(TransferFailed):
        stream.wait_for_layer(1)


def check_producer_closes_in_a_stream(rig: Rig) -> None:
    """A waiting reader raises, the writer's next layer raises, and its block ends quietly."""
    producer, reader = rig.serve(), rig.connect()
    stream = LayerStream(producer, reader, written=1)
    waiting = stream.begin("wait_layer", layer=1)
    producer.close()
    expect(PeerLostError, waiting.result, PATIENCE, mentions=("layer 1",))
    expect(ClosedError, stream.write, ("kv", 1))
    stream.out.__exit__(ValueError, ValueError("of the user"), None)  # raises nothing of its own


def check_reader_closes_in_a_stream(rig: Rig) -> None:
    """Its waiting call raises, the layers that it has keep their bytes, the producer goes on."""
    producer, reader, other = rig.serve(), rig.connect(), rig.connect_here()
    closing = LayerStream(producer, reader, readers=2, written=1)
    waiting = closing.begin("wait_layer", layer=1)
    reader.call("close")
    expect(ClosedError, waiting.result, PATIENCE, mentions=("layer 1",))
    with other.stream_get("s", timeout=60) as stream:
        closing.write(("kv", 1), ("kv", 2))
        receipt = closing.out.commit()
        assert fingerprint(stream.wait()) == fingerprint(THREE.make())
    reader.peer.call("release", key="s")
    receipt.wait(timeout=60)


def check_a_flipped_bit_ends_a_stream(rig: Rig) -> None:
    """After a layer was rejected, the writer's next layer raises, and so does every reader.

    A reader whose bytes come through a socket finds it before it has the layer, and may so end the
    stream before the other reader takes layer 0.
    """
    copier = TamperingCopier()
    producer, consumer, other = rig.serve(copier=copier), rig.connect_here(), rig.connect()
    copier.tamper = partial(flip_bit, "kv.1.value", -1)
    writing = LayerStream(producer, data=THREE.make(), readers=2)
    waiting = other.submit("get", key="s", timeout=PATIENCE)
    stream = consumer.stream_get("s", timeout=60)
    writing.write(("kv", 0), ("kv", 1))
    targets = [torch.zeros_like(dense(view)) for view in writing.layers["kv", 0]]
    first_error = _error_of(stream, 0, targets)
    if first_error is None:
        assert hash_tensors(targets) == writing.hash("kv", 0)
    errors = [_error_of(stream, layer, targets) for layer in (1, 2)]
    get_error = waiting.exception(PATIENCE)
    for error in (*errors, get_error):
        assert isinstance(error, (TransferFailed, IntegrityError)), error
        assert all(text in str(error) for text in ("layer 1", "V")), error
    assert IntegrityError in map(type, (*errors, get_error)), "one of them found it"
    on_arrival = stream.delivery.is_verified or type(get_error) is IntegrityError
    assert first_error is None or on_arrival, first_error
    stream.release()
    until(lambda: producer.stats()["transfers"]["failed"] > 0, "the rejection arrived")
    expect(TransferFailed, writing.write, ("kv", 2), mentions=("rejected", "layer 1"))
    writing.out.fail("the writer left its block")


def _error_of(
    stream: ReceivedStream, layer: int, targets: Sequence[torch.Tensor]
) -> Exception | None:
    try:
        stream.wait_for_layer(layer).scatter(*targets)
    except Exception as error:
        return without_frames(error)
    return None
