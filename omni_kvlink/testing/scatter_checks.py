"""Checks of `scatter`, which copies a payload out and verifies it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import torch

from omni_kvlink.errors import IntegrityError, TransferFailed
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import MIXED, NESTED, TENSORS, Recipe, hash_tensors
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import Rig, expect, until, until_freed
from omni_kvlink.testing.stream_checks import LayerStream
from omni_kvlink.testing.tampering import TamperingCopier, flip_bit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.link import ReceivedStream

ODD = Recipe("s", layers=3, tokens=11, heads=3, dim=8)


def check_scatter_of_a_stream(rig: Rig) -> None:
    """A reader copies each layer out as it comes, with digests and without."""
    for digests in (True, False):
        producer, reader = rig.serve(digests=digests), rig.connect()
        stream = LayerStream(producer, reader, Recipe("s", bundle=True, tokens=9).make())
        stream.pass_through(command="scatter_layer")
        until_freed(producer)
        producer.close()


def check_scatter_into_tensors_of_the_reader(rig: Rig) -> None:
    """In a list, or in a payload of the same structure."""
    producer, consumer = rig.serve(), rig.connect_here()
    for recipe in (ODD, Recipe("b", bundle=True), Recipe("l", latent=True), *TENSORS):
        data = recipe.make()
        receipt = producer.put(data)
        received = consumer.get(recipe.key, timeout=60)
        targets = [torch.zeros_like(dense(tensor)) for tensor in data.tensors()]
        received.scatter(targets)
        assert hash_tensors(targets) == hash_tensors(data.tensors()), recipe
        other = dataclasses.replace(recipe, seed=7).make(contiguous=True)
        received.scatter(other)
        assert hash_tensors(other.tensors()) == hash_tensors(data.tensors()), recipe
        received.release()
        receipt.wait(timeout=60)


def check_scatter_finds_a_flipped_bit(rig: Rig) -> None:
    """`scatter` raises, names the tensor, and the receipt says that the payload was rejected."""
    copier = TamperingCopier()
    producer, consumer, other = rig.serve(copier=copier), rig.connect_here(), rig.connect()
    for recipe, name, mentions in (
        (ODD, "kv.0.key", ("layer 0", "K")),
        (ODD, "kv.2.value", ("layer 2", "V")),
        (NESTED, "tensors/nested/0", ("nested/0",)),
        (MIXED, "extra/nested/1/mask", ("nested/1/mask",)),
    ):
        copier.tamper = partial(flip_bit, name, -1)
        data = recipe.make()
        targets = [torch.zeros_like(dense(view)) for view in data.tensors()]
        receipt = producer.put(data)
        received = consumer.get(recipe.key, timeout=60, verify="off")  # "auto" may find it earlier
        views = received.data.tensors()
        error = expect(IntegrityError, received.scatter, targets, mentions=mentions)
        expect(TransferFailed, receipt.wait, timeout=60, mentions=("rejected", *mentions))
        assert producer.stats()["transfers"]["leased"] == 1, "its views are in use"
        del views
        received.release()
        until(lambda: not producer.stats()["transfers"]["leased"], "an error keeps no payload")
        del error
        expect(TransferFailed, other.call, "get", key=recipe.key, timeout=60)


def check_a_flipped_bit_ends_a_stream(rig: Rig) -> None:
    """After a layer was rejected, the writer's next layer raises, and so does every reader.

    A reader whose bytes come through a socket finds it before it has the layer, and may so end the
    stream before the other reader takes layer 0.
    """
    copier = TamperingCopier()
    producer, consumer, other = rig.serve(copier=copier), rig.connect_here(), rig.connect()
    copier.tamper = partial(flip_bit, "kv.1.value", -1)
    writing = LayerStream(producer, data=ODD.make(), readers=2)
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
        return error.with_traceback(None)
    return None
