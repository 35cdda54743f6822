"""Layers copied asynchronously: the writer continues, readers wait, errors are reported.

A fake copier stands in for a device and completes each copy when a test lets it; the real one is
tested in tests/gpu.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVConsumer, KVProducer, SchemaError, TransferFailed, TransferTimeout
from omni_kvlink.copier import GatherHandle, StreamEvents, TorchCopier
from omni_kvlink.link import PutStream, put_operation
from omni_kvlink.testing.caches import Recipe, fingerprint, layers_of
from omni_kvlink.testing.rig import expect, until_freed
from support.link.ends import use_copier
from support.processes.locks import held, locks_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView

# Reaches into _queue, _pending: the test waits for one copy, or holds the locks; a stream reports
# an error alone.

pytestmark = pytest.mark.usefixtures("leaves_nothing")
RECIPE = Recipe("s", layers=3, tokens=10, dim=24)


class Late(TorchCopier):
    """Begins nothing before `go` is set; then copies, or fails with `error`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None

    def begin_gather(
        self,
        sources: Sequence[TensorView],
        manifest: Manifest,
        region: Region,
        *,
        after: StreamEvents | None = None,
    ) -> GatherHandle:
        def finish() -> list[str]:
            assert self.go.wait(60)
            if self.error:
                raise self.error
            return self.gather(sources, manifest, region)

        return GatherHandle(finish)


@pytest.fixture
def late(ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    copier = use_copier(Late(), ends[0])
    monkeypatch.setattr(put_operation, "is_on_device", lambda view: True)
    yield copier
    copier.go.set()


def write(out: PutStream) -> None:
    for (_, layer), views in layers_of(RECIPE.make()).items():
        out.write_layer(layer, *views)


def test_the_writer_goes_on_and_readers_wait(
    ends: tuple[KVProducer, KVConsumer], late: Late
) -> None:
    producer, consumer = ends
    with producer.stream_put(RECIPE.make()) as out:
        write(out)  # returns, though nothing has landed
        stream = consumer.stream_get("s", timeout=60)
        expect(TransferTimeout, lambda: stream.wait_for_layer(0, timeout=0.05))
        late.go.set()
    assert [layer.index for layer in stream] == [0, 1, 2]
    assert fingerprint(stream.wait(timeout=60)) == fingerprint(RECIPE.make())
    stream.release()
    assert out.receipt is not None
    assert out.ledger.copies == 1


def test_a_landing_that_fails_ends_the_stream(
    ends: tuple[KVProducer, KVConsumer], late: Late
) -> None:
    producer, consumer = ends
    late.error = OSError("the device is gone")
    out = producer.stream_put(RECIPE.make())
    stream = consumer.stream_get("s", timeout=60)
    write(out)
    late.go.set()
    expect(OSError, out.commit, mentions=("gone",))
    expect(TransferFailed, lambda: stream.wait_for_layer(0), mentions=("the device is gone",))
    stream.release()
    until_freed(producer)


def test_memory_waits_for_what_is_under_way(
    ends: tuple[KVProducer, KVConsumer], late: Late
) -> None:
    """A failed stream frees its memory only after the last copy into it has ended."""
    producer, _ = ends
    out = producer.stream_put(RECIPE.make())
    write(out)
    failing = threading.Thread(target=out.fail, args=("enough",))
    failing.start()
    failing.join(0.2)
    assert producer.stats()["memory"]["blocks"] == 1
    late.go.set()
    failing.join(60)
    until_freed(producer)


def test_an_error_of_an_earlier_layer_stops_the_writer(
    ends: tuple[KVProducer, KVConsumer], late: Late
) -> None:
    producer, _ = ends
    late.go.set()
    out = producer.stream_put(RECIPE.make())
    views = layers_of(RECIPE.make())
    out.write_layer(0, *views["kv", 0])
    assert out._queue._pending[0].wait(60)
    producer.abort("s")
    out.write_layer(1, *views["kv", 1])
    assert out._queue._pending[-1].wait(60)
    assert out._queue._pending[-1].error is not None
    expect(TransferFailed, lambda: out.write_layer(2, *views["kv", 2]))
    out.fail("ended")


def test_a_forgotten_stream_waits_for_what_is_under_way(
    ends: tuple[KVProducer, KVConsumer], late: Late
) -> None:
    producer, _ = ends
    written = threading.Event()
    forgetting = threading.Thread(target=_forget, args=(producer, written))
    forgetting.start()
    assert written.wait(60)
    forgetting.join(0.2)
    assert producer.stats()["memory"]["blocks"] == 1
    late.go.set()
    forgetting.join(60)
    until_freed(producer)


@pytest.mark.filterwarnings("ignore:stream 's' was not committed")
def test_a_forgotten_stream_takes_no_lock(ends: tuple[KVProducer, KVConsumer], late: Late) -> None:
    """The collector drops it in any thread, whatever other threads have locked."""
    streams = [ends[0].stream_put(RECIPE.make())]
    write(streams[0])
    dropping = threading.Thread(target=streams.clear)
    with held(locks_of(streams[0]._queue)) as count:
        dropping.start()
        dropping.join(20)
        assert count
        assert not dropping.is_alive()
    late.go.set()
    until_freed(ends[0])


def _forget(producer: KVProducer, written: threading.Event) -> None:
    out = producer.stream_put(RECIPE.make())
    write(out)
    written.set()
    with pytest.warns(ResourceWarning, match="not committed"):
        del out


def test_announcements_fit_into_messages(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large layer K and V are announced one by one; a larger tensor is refused at once."""
    producer, consumer = ends
    monkeypatch.setattr(put_operation, "MAX_DIGITS", 8)
    with producer.stream_put(RECIPE.make()) as out:
        write(out)
        stream = consumer.stream_get("s", timeout=60)
        assert [layer.index for layer in stream] == [0, 1, 2]
    stream.release()
    monkeypatch.setattr(put_operation, "MAX_DIGITS", 7)
    with pytest.raises(SchemaError, match="cannot be streamed"):
        producer.stream_put(Recipe("other", layers=3, tokens=10, dim=24).make())
    until_freed(producer)
