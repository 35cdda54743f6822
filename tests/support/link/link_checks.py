"""Checks of the link that a connector has no part in, for the same rigs as the conformance kit's.

Arguments that are refused, targets of `scatter`, requests in a chunk, data after their block; with
those of `allocation_checks` and `asyncio_checks`.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.errors import (
    CapacityError,
    ClosedError,
    IntegrityError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.link import Payload
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.payload.views import TensorView, dense
from omni_kvlink.testing.append_stream_checks import LENGTHS, append, take
from omni_kvlink.testing.caches import (
    NESTED,
    Recipe,
    Tensors,
    chunk,
    fingerprint,
    hash_chunk,
    hash_tensors,
)
from omni_kvlink.testing.conformance import CONNECTOR_CHECKS, checks_of
from omni_kvlink.testing.leaving_checks import ReaderError, until_offered
from omni_kvlink.testing.memory_checks import ODD
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import (
    Rig,
    deliver,
    expect,
    receive,
    until,
)
from omni_kvlink.testing.stream_checks import LayerStream
from omni_kvlink.testing.tampering import TamperingCopier, flip_bit
from support.link import aio_checks as asyncio_checks
from support.link import allocation_checks

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from omni_kvlink.aio import AsyncKVConsumer, AsyncKVProducer

    Transfer = Callable[[AsyncKVProducer, AsyncKVConsumer], Awaitable[None]]
    from collections.abc import Mapping

SIZE = 4
"""Tokens of a block in the paged targets."""


def check_ends_have_their_own_methods(rig: Rig) -> None:
    """A producer has no method that receives, a consumer none that sends."""
    producer, consumer = rig.serve(), rig.connect_here()
    assert not [name for name in ("get", "stream_get") if hasattr(producer, name)]
    sending = ("put", "stream_put", "allocate", "fail")
    assert not [name for name in sending if hasattr(consumer, name)]
    data = Recipe("side").make()
    receipt = producer.put(data)
    receive(consumer, receipt, data)


def check_wrong_layers_are_refused(rig: Rig) -> None:
    """A layer that is not in the plan is refused, and the stream goes on."""
    producer, consumer = rig.serve(), rig.connect_here()
    written = LayerStream(producer)
    out = written.out
    key, value = written.layers["kv", 0]
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
        written.write()
        out.commit()
        assert fingerprint(stream.wait()) == fingerprint(written.data)


def check_scatter_into_any_target(rig: Rig) -> None:
    """Dense, strided and paged targets get every byte, and nothing else is written."""
    producer, consumer = rig.serve(), rig.connect_here()
    data = ODD.make()
    for make in (dense_target, strided_target, blocks_target, slots_target):
        for streamed in (False, True):
            receipt = producer.put(data)
            pairs = [make(view) for view in data.tensors()]
            targets = [target for target, _ in pairs]
            if streamed:
                with consumer.stream_get("s", timeout=60) as stream:
                    for layer in stream:
                        layer.scatter(*targets[2 * layer.index : 2 * layer.index + 2])
                    del layer
            else:
                received = consumer.get("s", timeout=60)
                arrived = received.ledger.copies
                received.scatter(targets)
                assert received.ledger.copies == arrived + 1
                received.release()
            assert hash_tensors(targets) == hash_tensors(data.tensors()), make
            assert all(is_clean() for _, is_clean in pairs), f"{make}: written outside the target"
            receipt.wait(timeout=60)


def check_get_into_any_target(rig: Rig) -> None:
    """The bytes are there when `get` returns: put before and after it, written layer by layer."""
    producer, consumer = rig.serve(), rig.connect_here()
    data = ODD.make()
    for make in (dense_target, strided_target, blocks_target):
        for how in ("before", "after", "layers"):
            pairs = [make(view) for view in data.tensors()]
            targets = [target for target, _ in pairs]
            get = partial(consumer.get, "s", timeout=PATIENCE, into=targets)
            with ThreadPoolExecutor(1) as pool:
                if how == "layers":
                    stream = LayerStream(producer, data=data)
                    getting = pool.submit(get)
                    stream.write()
                    receipt = stream.out.commit()
                elif how == "after":
                    getting = pool.submit(get)
                    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "it is requested")
                    receipt = producer.put(data)
                else:
                    receipt = producer.put(data)
                    getting = pool.submit(get)
                with getting.result(PATIENCE) as received:
                    assert fingerprint(received) == fingerprint(data)
                    assert hash_tensors(targets) == hash_tensors(data.tensors()), (make, how)
            del received, getting
            assert all(is_clean() for _, is_clean in pairs), f"{make}: written outside the target"
            receipt.wait(timeout=60)


def check_layers_are_copied_while_others_are_written(rig: Rig) -> None:
    """`get` with `into` has the first layers before the last one is written."""
    producer, consumer = rig.serve(), rig.connect_here()
    stream = LayerStream(producer)
    targets = [torch.zeros_like(dense(view)) for view in stream.data.tensors()]
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(consumer.get, "s", timeout=PATIENCE, into=targets)
        stream.write(("kv", 0))
        first = hash_tensors(stream.layers["kv", 0])
        until(lambda: hash_tensors(targets[:2]) == first, "layer 0 is copied")
        assert not getting.done()
        stream.out.fail("the model has failed")
        expect(TransferFailed, getting.result, PATIENCE, mentions=("the model has failed",))
    assert not targets[-1].any()


def check_get_into_wrong_targets(rig: Rig) -> None:
    """Nothing is written, and another get has the payload; wrong bytes are an error, too."""
    producer, consumer = rig.serve(copier=(copier := TamperingCopier())), rig.connect_here()
    data = ODD.make()
    receipt = producer.put(data)
    targets = [torch.zeros_like(dense(view)) for view in data.tensors()]
    for into in (targets[:-1], [*targets[:-1], targets[0]], {"no": targets}, "text"):
        expect(SchemaError, consumer.get, "s", timeout=60, into=into)
    assert not any(target.any() for target in targets)
    until(lambda: receipt.lost_readers == 4, "it was given back")
    receive(consumer, receipt, data)
    stream = LayerStream(producer)
    layers = [torch.zeros_like(dense(view)) for view in stream.data.tensors()]
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(consumer.get, "s", timeout=PATIENCE, into=[*layers[:-1], layers[0]])
        stream.write(("kv", 0))
        expect(SchemaError, getting.result, PATIENCE, mentions=("share memory",))
        assert not layers[0].any(), "written before the last target was looked at"
        stream.write(*list(stream.layers)[1:])
    receive(consumer, stream.out.commit(), stream.data)
    receipt = producer.put(data, digests=False)
    full = partial(consumer.get, "s", timeout=60, verify="full")
    expect(IntegrityError, full, into=targets, mentions=("no digests",))
    receive(consumer, receipt, data)
    copier.tamper = partial(flip_bit, "kv.0.key", 0)
    receipt = producer.put(data)
    expect(IntegrityError, consumer.get, "s", timeout=60, into=targets)
    expect(TransferFailed, receipt.wait, timeout=60)


def check_wrong_targets(rig: Rig) -> None:
    """Wrong targets are refused before a byte is written, and the payload stays usable."""
    producer, consumer = rig.serve(), rig.connect_here()
    data = ODD.make()
    receipt = producer.put(data)
    received = consumer.get("s", timeout=60)
    for make_wrong in _WRONG:
        pairs = [dense_target(view) for view in data.tensors()]
        targets = [target for target, _ in pairs]
        digest = hash_tensors(targets)
        wrong = make_wrong(targets, received.data.tensors())
        expect(SchemaError, received.scatter, wrong)
        assert hash_tensors(targets) == digest, "written before it was refused"
        assert all(is_clean() for _, is_clean in pairs)
        del wrong
    targets = [dense_target(view)[0] for view in data.tensors()]
    received.scatter(targets)
    assert hash_tensors(targets) == hash_tensors(data.tensors())
    received.release()
    expect(ClosedError, received.scatter, targets)
    receipt.wait(timeout=60)


Target = tuple[TensorView, Callable[[], bool]]
"""A target, and a function that tells whether nothing outside of it was written."""


def dense_target(source: TensorView) -> Target:
    """A dense target between two guards."""
    capacity = torch.full((source.nbytes + 128,), 0xA5, dtype=torch.uint8)
    inner = capacity[64:-64].view(source.dtype).view(source.shape)
    return inner, lambda: bool((capacity[:64] == 0xA5).all() and (capacity[-64:] == 0xA5).all())


def strided_target(source: TensorView) -> Target:
    """A target with tokens and heads transposed, which has every second row of its memory."""
    tokens, *row = source.shape
    capacity = torch.zeros((row[0], 2 * tokens, *row[1:]), dtype=source.dtype)
    gaps = capacity[:, 1::2].view(capacity.dtype)
    return capacity[:, ::2].transpose(0, 1), lambda: not gaps.contiguous().view(torch.uint8).any()


def blocks_target(source: TensorView) -> Target:
    """A paged target with blocks in reverse order, the last one partly filled."""
    tokens, *row = source.shape
    blocks = -(-tokens // SIZE)
    pool = torch.zeros((2 * blocks, SIZE, *row), dtype=source.dtype)
    ids = [2 * block + 1 for block in reversed(range(blocks))]
    pages = BlockTable.of_blocks(ids, tokens=tokens, block_size=SIZE)
    return PagedTensor(pool, pages), lambda: not pool[::2].contiguous().view(torch.uint8).any()


def slots_target(source: TensorView) -> Target:
    """A paged target with one slot for each token."""
    tokens, *row = source.shape
    pool = torch.zeros((tokens, SIZE, *row), dtype=source.dtype)
    slots = [SIZE * token + token % 2 for token in reversed(range(tokens))]
    pages = BlockTable.of_slots(slots, block_size=SIZE)
    return PagedTensor(pool, pages), lambda: not pool[:, 2:].contiguous().view(torch.uint8).any()


def one_token_on(target: torch.Tensor) -> torch.Tensor:
    """A target that begins with the second token of another one."""
    token = target.stride(0)
    return target.as_strided(target.shape, target.stride(), target.storage_offset() + token)


MakeWrong = Callable[[list[TensorView], Sequence[TensorView]], Sequence[TensorView] | Payload]
_WRONG: tuple[MakeWrong, ...] = (
    lambda mine, theirs: mine[:-1],
    lambda mine, theirs: [*mine, mine[0]],
    lambda mine, theirs: [*mine[:-1], dense(mine[-1])[:-1]],
    lambda mine, theirs: [*mine[:-1], dense(mine[-1]).view(torch.float16)],
    lambda mine, theirs: [*mine[:-1], dense(mine[-1]).to("meta")],
    lambda mine, theirs: [*mine[:-1], dense(mine[-1])[:1].expand(dense(mine[-1]).shape)],
    lambda mine, theirs: [*mine[:-1], mine[0]],
    lambda mine, theirs: [*mine[:-1], one_token_on(dense(mine[0]))],
    lambda mine, theirs: [*mine[:-1], theirs[-1]],
    lambda mine, theirs: Recipe("s", layers=2, tokens=11, heads=3, dim=8).make(),
)


def check_chunks_are_as_the_spec_says(rig: Rig) -> None:
    """Another name, dtype, shape or number of tensors is refused, and the stream goes on."""
    producer, consumer = rig.serve(), rig.connect_here()
    spec = {"hidden": torch.empty(0, 24), "ids": torch.empty(0, dtype=torch.int64)}
    good = {"hidden": torch.randn(4, 24), "ids": torch.arange(4)}
    expect(SchemaError, producer.open_stream, "g", {}, mentions=("no tensors",))
    expect(SchemaError, producer.open_stream, "g", spec, dim=1, mentions=("ids", "dimension 1"))
    expect(SchemaError, producer.open_stream, "g", spec, window=0, mentions=("window",))
    expect(SchemaError, consumer.read_stream, "g", timeout=60, start=-1, mentions=("start",))
    with producer.open_stream("g", spec) as out:
        for bad, mentions in (
            ({**good, "hidden": torch.randn(4, 23)}, ("hidden", "23", "24")),
            ({**good, "hidden": torch.randn(4, 24).half()}, ("hidden", "float16")),
            ({"hidden": good["hidden"]}, ("1 tensors", "2")),
            ({**good, "more": good["ids"]}, ("3 tensors",)),
            ({"ids": good["ids"], "hidden": good["hidden"]}, ("ids",)),
            ({**good, "ids": torch.tensor(7)}, ("ids", "no dimension")),
        ):
            expect(SchemaError, out.append, bad, mentions=mentions)
        expect(SchemaError, out.append, [good["ids"]], mentions=("dict",))
        expect(SchemaError, out.append, good, {"bad": {1, 2}}, mentions=("metadata",))
        assert out.count == 0
        out.append(good, {"step": 1})
        out.commit()
    with consumer.read_stream("g", timeout=60) as stream:
        assert [received.data.metadata for received in stream] == [{"step": 1}]
    out.commit().wait(timeout=60)


def check_a_stream_is_joined(rig: Rig) -> None:
    """`concatenate` joins the chunks along the dimension that grows, and its file opens again."""
    producer, consumer = rig.serve(), rig.connect_here()
    for lengths in ((), LENGTHS):
        parts = [torch.randn(2, rows, 3) for rows in lengths]
        spec = {"audio": [torch.empty(2, 0, 3, device="meta")]}
        with producer.open_stream("g", spec, dim=1, metadata={"rate": 16}) as out:
            append(out, [{"audio": [part]} for part in parts])
        joined = consumer.read_stream("g", timeout=60).concatenate()
        assert torch.equal(joined["audio"][0], torch.cat([torch.empty(2, 0, 3), *parts], 1))
        assert joined.metadata == {"rate": 16}
        with tempfile.TemporaryDirectory() as folder:
            joined.save(Path(folder, "g.safetensors"))
            loaded = TensorTransferData.load(Path(folder, "g.safetensors"))
        assert not loaded.difference(joined), loaded.difference(joined)
        out.commit().wait(timeout=60)


def check_a_chunk_carries_many_requests(rig: Rig) -> None:
    """The tensors that a step has for many requests are one chunk, which the reader takes apart."""
    producer, consumer = rig.serve(), rig.connect_here()
    requests = [{"a": 3, "b/0": 0, "ç": 1}, {"ç": 2, "a": 1, "b/0": 1}, {"a": 700}, {"a": 700}, {}]
    steps = [(sizes, chunk(n, sum(sizes.values()))) for n, sizes in enumerate(requests)]
    with producer.open_stream("g", chunk(0)) as out:
        for number, (sizes, tensors) in enumerate(steps):
            assert out.append_requests(sizes, tensors, timeout=60) == number
        expect(SchemaError, out.append_requests, {"a": 2}, chunk(5, 3), mentions=("3 rows", "2"))
        last = {"b/0": "it fell over"}
        out.append_requests({"a": 1}, chunk(5, 1), ended=["a"], failed=last, timeout=60)
        out.append(chunk(6), timeout=60)
    with consumer.read_stream("g", timeout=60, verify="full") as stream:
        for sizes, tensors in steps:
            parts = take(stream).requests()
            assert (parts.ended, parts.failed) == ((), {})
            assert _hashes(parts) == _hashes(_taken_apart(tensors, sizes))
        step = take(stream)
        parts = step.requests()
        assert (list(parts), parts.ended, parts.failed) == (["a"], ("a",), last)
        expect(SchemaError, take(stream).requests, mentions=("append_requests",))
        expect(ClosedError, step.requests)
        assert stream.receive() is None
    out.commit().wait(timeout=60)


def _hashes(requests: Mapping[str, Tensors]) -> list[tuple[str, str]]:
    """Each request, in order, with the hash of its tensors."""
    return [(key, hash_chunk(tensors)) for key, tensors in requests.items()]


def _taken_apart(tensors: Tensors, sizes: Mapping[str, int]) -> dict[str, Tensors]:
    """Split the tensors of a chunk into those of each request."""
    tokens, nested = tensors["more"]
    rows = [part.split(list(sizes.values())) for part in (tensors["hidden"], tokens)]
    scales = nested["scale"].split(list(sizes.values()))
    return {
        key: {"hidden": hidden, "more": [ids, {"scale": scale}]}
        for key, hidden, ids, scale in zip(sizes, *rows, scales, strict=True)
    }


def check_appends_of_two_threads_keep_their_deadlines(rig: Rig) -> None:
    """One that waits for a reader does not hold another up beyond its timeout."""
    producer = rig.serve()
    out = producer.open_stream("g", chunk(0), window=1)
    append(out, [chunk(0)])

    def is_held_up() -> bool:
        error = expect(CapacityError, out.append, chunk(1), timeout=0.0)
        return "another append" in str(error)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(out.append, chunk(1), timeout=PATIENCE)
        until(is_held_up, "the other thread appends")
        out.fail("enough")
        expect(TransferFailed, waiting.result, PATIENCE, mentions=("enough",))


def check_data_is_closed_after_the_block(rig: Rig) -> None:
    """Using a payload after its `with` block raises, and the error names the block."""
    producer, consumer = rig.serve(), rig.connect_here()
    for recipe in (Recipe("c"), Recipe("b", bundle=True), NESTED):
        receipt = producer.put(recipe.make())
        with consumer.get(recipe.key, timeout=60) as data:
            pass
        expect(ClosedError, data.tensors, mentions=("with",))
        receipt.wait(timeout=60)


def check_refused_puts_use_nothing(rig: Rig) -> None:
    """A put with wrong arguments uses neither memory nor the key."""
    producer, reader = rig.serve(), rig.connect()
    data = Recipe("k").make()
    for readers in (0, -1):
        expect(SchemaError, producer.put, data, readers=readers)
    for ttl in (0.0, -1.0, float("nan")):
        expect(SchemaError, producer.put, data, ttl=ttl)
    assert producer.stats()["memory"]["used"] == 0
    deliver(producer, reader, data)


def check_the_first_ending_of_a_payload_counts(rig: Rig) -> None:
    """After `release` it is read whatever follows, after `release_unread` it is not."""
    producer, consumer = rig.serve(), rig.connect_here()
    receipt = producer.put(Recipe("r").make())
    for is_read in (False, True):
        with contextlib.suppress(ReaderError), (received := consumer.get("r", timeout=60)) as data:
            kept = data.tensors()
            if not is_read:
                received.release_unread()
            received.release()
            raise ReaderError
        assert not receipt.done, "its tensors are in use"
        del data, kept, received
        if not is_read:
            until_offered(receipt)
    receipt.wait(timeout=60)


def check_release_wakes_a_waiting_thread(rig: Rig) -> None:
    """A thread that waits for a layer raises when the stream is released by another."""
    producer, consumer = rig.serve(), rig.connect_here()
    written = LayerStream(producer)
    written.write(("kv", 0))
    stream = consumer.stream_get("s", timeout=60)
    kept = stream.wait_for_layer(0).key
    progress: Any = stream.delivery.progress
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream.wait_for_layer, 1, timeout=PATIENCE)
        # A thread that waits for a layer has no effect that shows before the layer comes.
        until(lambda: bool(progress._waiting), "it waits")
        stream.release()
        expect(ClosedError, waiting.result, PATIENCE)
    expect(ClosedError, stream.wait_for_layer, 0)
    assert hash_tensors([kept]) == hash_tensors([written.layers["kv", 0][0]])
    written.write(("kv", 1), ("kv", 2))
    receipt = written.out.commit()
    assert not receipt.done, "released while a view was held"
    del kept
    receipt.wait(timeout=60)


LINK_CHECKS = checks_of(sys.modules[__name__], allocation_checks, asyncio_checks)
ALL_CHECKS = (*CONNECTOR_CHECKS, *LINK_CHECKS)
"""What the tests run over each connector of the package."""
