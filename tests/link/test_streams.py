"""Streams and allocations as their users see them; what connectors must do is in the kit."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open

from omni_kvlink import (
    KVCacheBundle,
    KVCacheTransferData,
    KVConsumer,
    KVProducer,
    SchemaError,
    TensorTransferData,
    TransferFailed,
    WireError,
)
from omni_kvlink.link import put_stream
from omni_kvlink.payload.views import same_bytes
from omni_kvlink.testing.caches import Recipe, fill, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.rig import expect, until_freed
from support.link.ends import delivery_of, end_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from omni_kvlink import Payload
    from omni_kvlink.link import PutStream, ReceivedStream

pytestmark = pytest.mark.usefixtures("leaves_nothing")
RECIPE = Recipe("s", layers=3, tokens=10, dim=24)
Ends = tuple[KVProducer, KVConsumer]


def write(out: PutStream, *layers: int) -> None:
    views = layers_of(RECIPE.make())
    for layer in layers:
        out.write_layer(layer, *views["kv", layer])


def cache(recipe: Recipe = RECIPE) -> KVCacheTransferData:
    data = recipe.make()
    assert isinstance(data, KVCacheTransferData)
    return data


def test_as_the_documents_say(ends: Ends) -> None:
    producer, consumer = ends
    with producer.stream_put(cache()) as out:
        stream = consumer.stream_get("s", timeout=60)
        write(out, 0, 1, 2)
    seen = [(layer.key.shape, layer.value.shape) for layer in stream]
    assert seen == [((10, 2, 24), (10, 2, 24))] * 3
    stream.release()
    assert out.receipt is not None
    out.receipt.wait(timeout=60)
    assert out.ledger.copies == 1
    assert list(out.ledger.seconds) == ["plan", "reserve", "copy", "publish"]


@pytest.mark.parametrize("kind", ["cache", "tensors", "bundle"])
def test_what_cannot_be_written_is_named(ends: Ends, kind: str) -> None:
    """A layer that was written, and one that the payload does not have: not one for the other."""
    producer, _ = ends
    tensors = TensorTransferData("s", {"a": torch.zeros(4), "b": torch.zeros(4)})
    branch = "part" if kind == "bundle" else ""
    payload: Payload = KVCacheBundle("s", {branch: tensors}) if branch else tensors
    if kind == "cache":
        payload = cache()
    out = producer.stream_put(payload)
    layers = len(payload.tensors()) // (2 if kind == "cache" else 1)
    views = cache().tensors()[:2] if kind == "cache" else [torch.zeros(4)]
    for layer in range(layers):
        out.write_layer(layer, *views, branch=branch)
    for layer in range(layers):
        with pytest.raises(SchemaError, match=rf"layer {layer} of branch .* was written already"):
            out.write_layer(layer, *views, branch=branch)
    for layer in (layers, -1):
        with pytest.raises(SchemaError, match=rf"the plan has no layer {layer} of branch"):
            out.write_layer(layer, *views, branch=branch)
    out.commit()


def test_an_error_of_the_block_is_not_hidden(ends: Ends) -> None:
    producer, _ = ends
    interrupts: tuple[Callable[[], None], ...] = (lambda: producer.abort("s"), producer.close)
    for interrupt in interrupts:
        with (  # noqa: PT012 - the block ends the stream
            pytest.raises(ValueError, match="of the block"),
            producer.stream_put(cache()),
        ):
            interrupt()
            raise ValueError("of the block")


def test_an_error_after_the_last_layer(ends: Ends) -> None:
    """Every layer was written, but the block failed: nothing is committed."""
    producer, consumer = ends
    out = producer.stream_put(cache())
    stream = consumer.stream_get("s", timeout=60)
    with pytest.raises(ValueError, match="of the block"), out:  # noqa: PT012 - it ends the stream
        write(out, 0, 1, 2)
        raise ValueError("of the block")
    assert out.receipt is None
    expect(TransferFailed, stream.wait, timeout=60, mentions=("of the block",))
    expect(TransferFailed, consumer.get, "s", timeout=60, mentions=("of the block",))
    stream.release()
    until_freed(producer)
    assert producer.stats()["transfers"]["committed"] == 0


def test_a_manifest_is_a_plan(ends: Ends) -> None:
    producer, consumer = ends
    plan = cache().plan(digests=False)
    with producer.stream_put(plan) as out, consumer.stream_get("s", timeout=60) as stream:
        write(out, 2, 1, 0)
        assert out.commit().ledger.digests == stream.ledger.digests == "off"
        assert fingerprint(stream.wait()) == fingerprint(cache())
    allocation = producer.allocate(cache(Recipe("t")))
    expect(SchemaError, lambda: producer.stream_put(allocation.capacity))
    allocation.release()


def test_a_forgotten_stream_is_loud_and_its_readers_are_told(ends: Ends) -> None:
    producer, consumer = ends
    out = producer.stream_put(cache())
    stream = consumer.stream_get("s", timeout=60)
    with pytest.warns(ResourceWarning, match="'s' was not committed"):
        del out
    expect(
        TransferFailed,
        lambda: stream.wait_for_layer(0),
        mentions=("never committed",),
    )
    stream.release()
    until_freed(producer)


def test_a_stream_may_be_collected_anywhere(ends: Ends) -> None:
    """Also during its own producer's work, where taking a lock would deadlock."""
    producer, _ = ends
    found = [producer.stream_put(cache())]

    def collect() -> None:
        with end_of(producer).lock, pytest.warns(ResourceWarning):
            found.clear()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    until_freed(producer)


def test_a_stream_that_cannot_begin_leaves_nothing(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, _ = ends

    def begin(*_: Any, **__: Any) -> None:
        raise TransferFailed("aborted meanwhile")

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(end_of(producer), "begin", begin)
        expect(TransferFailed, lambda: producer.stream_put(cache()))
        gc.collect()
    assert not caught, "it warned of a stream that never was"
    until_freed(producer)
    producer.stream_put(cache()).fail("enough")


def test_endless_timeouts(ends: Ends) -> None:
    producer, consumer = ends
    out = producer.stream_put(cache(), timeout=float("inf"))
    with out, consumer.stream_get("s", timeout=float("inf")) as stream:
        write(out, 0, 1, 2)
        out.commit()
        for timeout in (None, 1e12, float("inf")):
            stream.wait_for_layer(2, timeout=timeout)
            stream.wait(timeout=timeout).close()


def test_an_error_for_each_who_waits(ends: Ends) -> None:
    """One error raised in several threads would gather the frames of all of them."""
    producer, consumer = ends
    out = producer.stream_put(cache())
    stream = consumer.stream_get("s", timeout=60)
    out.fail("no")
    errors = [expect(TransferFailed, lambda: stream.wait_for_layer(n)) for n in (0, 0, 1)]  # noqa: B023
    assert len(set(map(id, errors))) == 3
    assert stream.delivery.progress is not None
    kept = stream.delivery.progress.whole.error
    assert kept is not None
    assert kept.__traceback__ is None
    stream.release()


@pytest.mark.parametrize("tokens", [10, 7])
def test_allocated_payloads_are_safetensors(ends: Ends, tokens: int, tmp_path: Path) -> None:
    producer, consumer = ends
    data = cache()
    allocation = producer.allocate(data)
    fill(allocation, data)
    sent = _first(allocation.data, tokens)
    producer.put(sent)
    received = consumer.get("s", timeout=60, verify="full")
    file = tmp_path / "payload.safetensors"
    region = delivery_of(received).region
    assert region is not None
    file.write_bytes(region.view())
    expected = layers_of(_first(data, tokens))
    with safe_open(file, "pt") as payload:
        names = [name for name in payload.keys() if not name.startswith("pad.")]  # noqa: SIM118
        assert len(names) == 6
        for name in names:
            branch, layer, part = name.split(".")
            view = expected[branch, int(layer)][part == "value"]
            assert hash_tensors([payload.get_tensor(name)]) == hash_tensors([view])
    loaded = KVCacheTransferData.load(file)
    assert fingerprint(loaded) == fingerprint(_first(data, tokens))
    received.release()


def test_other_bytes_are_not_taken_for_those_of_the_plan(ends: Ends) -> None:
    """A tensor at its place, but of another dtype or shape."""
    producer, consumer = ends
    allocation = producer.allocate(cache())
    data = cache()
    fill(allocation, data)
    with producer.stream_put(allocation.data) as out:
        (key, value), *others = layers_of(allocation.data).values()
        for wrong in (key.view(torch.float16), key[:-1]):  # type: ignore[union-attr, index]
            expect(SchemaError, lambda w=wrong: out.write_layer(0, w, value))
        out.write_layer(0, key, value)
        for layer, views in enumerate(others, 1):
            out.write_layer(layer, *views)
    with consumer.get("s", timeout=60, verify="full") as found:
        assert fingerprint(found) == fingerprint(data)
    assert out.ledger.copies == 0


def test_memory_behind_a_stream_is_not_a_source(ends: Ends) -> None:
    """What was allocated and is not sent may be written to by the link."""
    producer, _ = ends
    allocation = producer.allocate(cache())
    plan = _first(allocation.data, 4)
    beyond = allocation.data.tensors()[-1][-4:]  # type: ignore[index]
    with pytest.raises(SchemaError, match="place"), producer.stream_put(plan) as out:
        out.write_layer(2, beyond, beyond)
    del plan, beyond
    until_freed(producer)


def test_a_link_keeps_no_spent_allocations(ends: Ends) -> None:
    producer, consumer = ends
    for end in ("release", "put", "stream"):
        allocation = producer.allocate(cache())
        if end == "release":
            allocation.release()
            continue
        data = allocation.data
        if end == "put":
            producer.put(data)
        else:
            with producer.stream_put(data) as out:
                for layer, views in enumerate(layers_of(data).values()):
                    out.write_layer(layer, *views)
                del views
        consumer.get("s", timeout=60).release()
        until_freed(producer)
    # What a link keeps of allocations that are spent costs memory, and shows nowhere.
    assert not producer._allocations
    kept = producer.allocate(cache())
    producer.close()
    assert not producer._allocations  # as above
    kept.release()


def test_a_stream_says_what_it_has_not(ends: Ends) -> None:
    producer, consumer = ends
    with producer.stream_put(Recipe("b", bundle=True).make()) as out:
        stream: ReceivedStream = consumer.stream_get("b", timeout=60)
        expect(SchemaError, lambda: stream.wait_for_layer(0), mentions=("which branch",))
        expect(SchemaError, lambda: stream.wait_for_layer(0, branch="cfg_text"))
        expect(SchemaError, lambda: out.write_layer(0, torch.zeros(1)), mentions=("which branch",))
        for (branch, layer), views in layers_of(Recipe("b", bundle=True).make()).items():
            out.write_layer(layer, *views, branch=branch)
        stream.release()


def _first(data: Any, tokens: int) -> KVCacheTransferData:
    about = {"kv_lens": [tokens], "ropes": [tokens], "num_layers": 3}
    blocks = {name: [t[:tokens] for t in layers] for name, layers in data.layer_blocks.items()}
    return KVCacheTransferData("s", blocks, metadata=about)


def test_rows_of_a_layer(ends: Ends) -> None:
    producer, consumer = ends
    producer.put(cache())
    with consumer.stream_get("s", timeout=60) as stream:
        layer = stream.wait_for_layer(1)
        targets = [torch.zeros_like(tensor[4:9]) for tensor in layer.tensors]
        layer.begin_scatter(*targets, rows=range(4, 9)).wait()
        for target, tensor in zip(targets, layer.tensors, strict=True):
            assert same_bytes(target, tensor[4:9])
        for wrong in (range(6, 11), range(-1, 4), range(4, 9, 2), range(4, 8)):
            with pytest.raises(SchemaError):
                layer.begin_scatter(*targets, rows=wrong)


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b"[" * 4000])
def test_an_end_that_is_no_object_is_refused(
    ends: Ends, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is not this library sends anything; the receipt says what its reader found."""
    producer, consumer = ends
    monkeypatch.setattr(put_stream, "encode_extra", lambda extra: text)
    with producer.stream_put(cache()) as out, consumer.stream_get("s", timeout=60) as stream:
        assert stream.extra == {}
        for (_, layer), views in layers_of(cache()).items():
            out.write_layer(layer, *views)
        receipt = out.finish({})
        stream.wait(timeout=60)
        expect(WireError, lambda: stream.extra, mentions=("no JSON object", "'s'"))
    expect(TransferFailed, lambda: receipt.wait(timeout=60), mentions=("no JSON object",))
