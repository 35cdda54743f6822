"""Checks of `put` and `get`: which reader gets what, and when."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import ClosedError, DuplicateKeyError, TransferFailed, TransferTimeout
from omni_kvlink.link import begin_get, open_delivery
from omni_kvlink.lowlevel import Delivery
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.testing.caches import MIXED, NESTED, TENSORS, Recipe, every_dtype, fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import (
    Rig,
    deliver,
    expect,
    receive,
    request,
    until,
    until_requested,
)

if TYPE_CHECKING:
    from omni_kvlink.lowlevel import PendingGet


def check_every_dtype_arrives(rig: Rig) -> None:
    """One cache of each dtype, random bytes with NaNs, bit for bit."""
    producer, reader = rig.serve(), rig.connect()
    for recipe in every_dtype("dtype"):
        deliver(producer, reader, recipe.make())


def check_every_shape_arrives(rig: Rig) -> None:
    """Every byte of all kinds of payload, with digests and without.

    Odd sizes, many layers, latent layers, nested tensors, an empty cache, and more than one chunk.
    """
    producer, reader = rig.serve(), rig.connect()
    for recipe in (
        Recipe("one byte", layers=1, tokens=1, heads=1, dim=1, dtype="uint8"),
        Recipe("odd", layers=3, tokens=7, heads=3, dim=5, dtype="float16"),
        Recipe("deep", layers=40, tokens=2, heads=1, dim=3, dtype="int8"),
        Recipe("latent", layers=2, tokens=9, dim=33, latent=True),
        Recipe("empty", layers=3, tokens=0),
        Recipe("ключ/%00 ?&#", tokens=1),
        Recipe("over a chunk", layers=1, tokens=1025, heads=4, dim=128, dtype="bfloat16"),
        *TENSORS,
    ):
        deliver(producer, reader, recipe.make(), verify="full", digests=True)
        deliver(producer, reader, recipe.make(), digests=False)


def check_bundle_arrives(rig: Rig) -> None:
    """Prefix, same, own and empty branches as one transfer, and no byte sent twice."""
    producer, reader = rig.serve(), rig.connect()
    data = Recipe("bundle", bundle=True, tokens=9, dtype="float32").make()
    receipt = producer.put(data)
    receive(reader, receipt, data)
    assert receipt.ledger.reused_nbytes > 0
    sent = sum(tensor.nbytes for tensor in data.tensors())
    assert receipt.ledger.nbytes < sent + (16 << 10), "a declared branch was sent again"


def check_tensors_have_their_structure(rig: Rig) -> None:
    """Dicts and lists come back as they were, and the kinds of payload are not mixed up."""
    producer, consumer = rig.serve(), rig.connect_here()
    for recipe in (NESTED, MIXED):
        data: Any = recipe.make()
        receipt = producer.put(data)
        received = consumer.get("t", timeout=60)
        payload: Any = received.data
        assert type(payload) is type(data)
        if recipe.bundle:
            assert list(payload.branches) == list(data.branches)
            payload, data = payload.tensor_data["extra"], data.tensor_data["extra"]
        assert type(payload) is type(data) is TensorTransferData
        assert not payload.difference(data), payload.difference(data)
        received.release()
        expect(ClosedError, payload.tensors)
        del payload
        receipt.wait(timeout=60)


def check_get_before_and_after_put(rig: Rig) -> None:
    """A waiting get returns when the payload is committed; it is kept for a reader that is late."""
    producer, reader = rig.serve(), rig.connect()
    for number in range(5):
        data = Recipe(f"early-{number}", seed=number).make()
        waiting = request(reader, producer, data.request_id)
        receipt = producer.put(data)
        assert waiting.result(PATIENCE) == fingerprint(data)
        receipt.wait(timeout=60)
    data = Recipe("late").make()
    receipt = producer.put(data)
    assert receipt.state == "committed"
    assert not receipt.done
    receive(rig.connect(), receipt, data)
    assert receipt.state == "released"


def check_either_side_starts_first(rig: Rig) -> None:
    """A reader that connects first waits for the producer to appear, until its deadline."""
    late, reader = rig.begin_connect(), rig.begin_connect()
    call = late.submit("connect", url=rig.url, timeout=0.2, **rig.options)
    expect(TransferTimeout, call.result, PATIENCE)
    connecting = reader.submit("connect", url=rig.url, timeout=PATIENCE, **rig.options)
    expect(TimeoutError, connecting.result, 0.1)
    producer = rig.serve()
    connecting.result(PATIENCE)
    deliver(producer, reader, Recipe("first").make())


def check_several_readers(rig: Rig) -> None:
    """A payload for three readers is done when the last of them releases it.

    The fourth get times out, and its error says why.
    """
    producer = rig.serve()
    *readers, last, other = [rig.connect() for _ in range(4)]
    data = Recipe("shared").make()
    receipt = producer.put(data, readers=3)
    for reader in readers:
        assert reader.call("get", key="shared", timeout=60) == fingerprint(data)
    assert last.call("hold", key="shared", timeout=60) == fingerprint(data)
    _time_out(other, "shared", "every declared reader has it")
    assert not receipt.done
    last.peer.call("release", key="shared")
    receipt.wait(timeout=60)


def check_a_get_of_a_released_key(rig: Rig) -> None:
    """It times out, and its error says that the payload was delivered; unless it is put again."""
    producer, reader = rig.serve(), rig.connect()
    data = Recipe("twice").make()
    receipt = producer.put(data)
    reader.call("get", key="twice", timeout=60)
    receipt.wait(timeout=60)
    _time_out(reader, "twice", "delivered to every declared reader")
    waiting = request(reader, producer, "twice")
    producer.put(data)
    assert waiting.result(60) == fingerprint(data)


def _time_out(reader: RemoteLink, key: str, phase: str) -> None:
    """A get times out at its deadline, with the reason that comes from the producer."""
    for timeout in (0.3, 3.0, 30.0):  # it must have come by then
        began = time.monotonic()
        error = expect(TransferTimeout, reader.call, "get", key=key, timeout=timeout)
        assert time.monotonic() - began > 0.99 * timeout
        assert error.key == key
        assert error.waited > 0.5 * timeout  # it counts from the request, after the call began
        if phase in error.phase:
            return
        assert timeout < 30.0, error.phase


def check_timeout_names_the_phase(rig: Rig) -> None:
    """A get of a key that is never put ends at its deadline, and the error says so.

    The timeout of `PendingGet.wait` counts from its call, not from the request.
    """
    rig.serve()
    reader, consumer = rig.connect(), rig.connect_here()
    pending = begin_get(consumer, "never", timeout=60)
    for timeout in (0.0, 0.05, 0.4):
        call = reader.submit("get", key="never", timeout=timeout)
        error = expect(TransferTimeout, call.result, PATIENCE, mentions=("never",))
        assert "not announced" in error.phase, error.phase
    began = time.monotonic()
    expect(TransferTimeout, pending.wait, timeout=0.2, mentions=("never",))
    assert time.monotonic() - began > 0.99 * 0.2


def check_a_done_get_does_not_wait(rig: Rig) -> None:
    """`wait` of a get whose future is done returns without waiting, or raises its error."""
    producer, consumer = rig.serve(), rig.connect_here()

    def begin(key: str) -> tuple[PendingGet, Future[Delivery]]:
        pending, outcome = begin_get(consumer, key, timeout=60), Future[Delivery]()

        def on_done(_: object) -> None:
            try:
                outcome.set_result(pending.wait(timeout=0.0))
            except Exception as error:
                outcome.set_exception(error)

        pending.future.add_done_callback(on_done)
        return pending, outcome

    for key in ("done", "at once"):  # there is memory for the second when it is offered
        data = Recipe(key).make()
        pending, outcome = begin(key)
        until_requested(producer, 1)  # the answer comes while the callback is there
        receipt = producer.put(data)
        delivery = outcome.result(PATIENCE)
        with open_delivery(consumer, delivery, started=time.perf_counter()) as payload:
            assert fingerprint(payload) == fingerprint(data)
        del payload, delivery, outcome
        receipt.wait(timeout=60)
    pending, outcome = begin("failed")
    until_requested(producer, 1)
    producer.fail("failed", "on purpose")
    expect(TransferFailed, outcome.result, PATIENCE)
    del pending  # a get that nobody has is cancelled


def check_duplicate_key(rig: Rig) -> None:
    """A live key is refused, whatever its state, and the first payload is unharmed."""
    producer, reader = rig.serve(), rig.connect()
    first, second = Recipe("twice", seed=1).make(), Recipe("twice", seed=2).make()
    receipt = producer.put(first)
    expect(DuplicateKeyError, producer.put, second, mentions=("twice",))
    assert reader.call("hold", key="twice", timeout=60) == fingerprint(first)
    expect(DuplicateKeyError, producer.put, second)
    assert not receipt.done
    reader.peer.call("release", key="twice")
    receipt.wait(timeout=60)


def check_a_get_that_gave_up_takes_nothing(rig: Rig) -> None:
    """After a get timed out, or is cancelled as the payload comes, another reader receives it."""
    producer, reader, consumer = rig.serve(), rig.connect(), rig.connect_here()
    other = rig.connect()
    for number in range(3):
        key = f"timed-out-{number}"
        expect(TransferTimeout, reader.call, "get", key=key, timeout=0.05)
        until(lambda: producer.stats()["transfers"]["waiting"] == 0, "the request was cancelled")
        deliver(producer, other, Recipe(key).make())
    for number in range(10):
        data = Recipe(f"cancelled-{number}").make()
        pending = begin_get(consumer, data.request_id, timeout=60)
        if number % 2:
            until_requested(producer, 1)
        receipt = producer.put(data)
        pending.cancel()
        receive(other, receipt, data)
