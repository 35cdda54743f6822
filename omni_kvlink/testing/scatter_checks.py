"""Checks of `scatter`, which copies a payload out and verifies it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch

from omni_kvlink.errors import ClosedError, IntegrityError, SchemaError, TransferFailed
from omni_kvlink.link import Payload, ReceivedStream
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.views import TensorView, dense
from omni_kvlink.testing.caches import Recipe, hash_tensors
from omni_kvlink.testing.memory_checks import TamperingCopier, flip_bit
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import Rig, expect, until, until_freed
from omni_kvlink.testing.stream_checks import begin, finish, write, write_all

ODD = Recipe("s", layers=3, tokens=11, heads=3, dim=8)
SIZE = 4
"""Tokens of a block in the paged targets."""


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


def check_scatter_of_a_stream(rig: Rig) -> None:
    """A reader copies each layer out as it comes, with digests and without."""
    for digests in (True, False):
        producer, reader = rig.serve(digests=digests), rig.connect()
        recipe = Recipe("s", bundle=True, tokens=9)
        out, layers = begin(producer, recipe)
        reader.call("stream_get", key="s", timeout=60)
        write_all(out, layers, reader, "s", "scatter_layer")
        finish(reader, recipe.make(), out.commit())
        until_freed(producer)
        producer.close()


def check_scatter_into_a_cache(rig: Rig) -> None:
    """The targets may be a payload of the reader's own."""
    producer, consumer = rig.serve(), rig.connect_here()
    for recipe in (ODD, Recipe("b", bundle=True), Recipe("l", latent=True)):
        data = recipe.make()
        receipt = producer.put(data)
        received = consumer.get(recipe.key, timeout=60)
        target = dataclasses.replace(recipe, seed=7).make()
        received.scatter(target)
        assert hash_tensors(target.tensors()) == hash_tensors(data.tensors())
        received.release()
        receipt.wait(timeout=60)


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


def check_scatter_finds_a_flipped_bit(rig: Rig) -> None:
    """`scatter` raises, names the tensor, and the receipt says that the payload was rejected."""
    copier = TamperingCopier()
    producer, consumer, other = rig.serve(copier=copier), rig.connect_here(), rig.connect()
    for name, mentions in (("kv.0.key", ("layer 0", "K")), ("kv.2.value", ("layer 2", "V"))):
        copier.tamper = partial(flip_bit, name, -1)
        data = ODD.make()
        targets = [torch.zeros_like(dense(view)) for view in data.tensors()]
        receipt = producer.put(data)
        received = consumer.get(
            "s", timeout=60, verify="off"
        )  # over a network "auto" would find it
        views = received.data.tensors()
        error = expect(IntegrityError, received.scatter, targets, mentions=mentions)
        expect(TransferFailed, receipt.wait, timeout=60, mentions=("rejected", *mentions))
        assert producer.stats()["transfers"]["leased"] == 1, "its views are in use"
        del views
        received.release()
        until(lambda: not producer.stats()["transfers"]["leased"], "an error keeps no payload")
        del error
        expect(TransferFailed, other.call, "get", key="s", timeout=60)


def check_a_flipped_bit_ends_a_stream(rig: Rig) -> None:
    """After a layer was rejected, the writer's next layer raises, and so does every reader.

    A reader whose bytes come through a socket finds it before it has the layer, and may so end the
    stream before the other reader takes layer 0.
    """
    copier = TamperingCopier()
    producer, consumer, other = rig.serve(copier=copier), rig.connect_here(), rig.connect()
    copier.tamper = partial(flip_bit, "kv.1.value", -1)
    out, layers = begin(producer, ODD, readers=2)
    waiting = other.submit("get", key="s", timeout=PATIENCE)
    stream = consumer.stream_get("s", timeout=60)
    write(out, layers, ("kv", 0), ("kv", 1))
    targets = [torch.zeros_like(dense(view)) for view in layers["kv", 0]]
    first_error = _error_of(stream, 0, targets)
    if first_error is None:
        assert hash_tensors(targets) == hash_tensors(layers["kv", 0])
    stream_errors = [_error_of(stream, layer, targets) for layer in (1, 2)]
    get_error = waiting.exception(PATIENCE)
    errors = [*stream_errors, get_error]
    for error in errors:
        assert isinstance(error, (TransferFailed, IntegrityError)), error
        assert all(text in str(error) for text in ("layer 1", "V")), error
    assert IntegrityError in map(type, errors), "one of them found it"
    on_arrival = stream.delivery.is_verified or type(get_error) is IntegrityError
    assert first_error is None or on_arrival, first_error
    stream.release()
    until(lambda: producer.stats()["transfers"]["failed"] > 0, "the rejection arrived")
    expect(TransferFailed, write, out, layers, ("kv", 2), mentions=("rejected", "layer 1"))
    out.fail("the writer left its block")


def _error_of(
    stream: ReceivedStream, layer: int, targets: Sequence[torch.Tensor]
) -> Exception | None:
    try:
        stream.wait_for_layer(layer).scatter(*targets)
    except Exception as error:
        return error.with_traceback(None)
    return None


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
