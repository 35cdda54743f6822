"""Observers: what they see of puts, receipts, gets and copies; none can harm a transfer."""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import (
    DuplicateKeyError,
    IntegrityError,
    KVLink,
    TensorTransferData,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.telemetry.observers import (
    Observer,
    TransferEvent,
    add_observer,
    remove_observer,
)
from omni_kvlink.testing.rig import until
from omni_kvlink.testing.tampering import TamperingCopier, flip_bit
from support.telemetry.recorder import Raising, Recorder, observing

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
SMALL, LARGE = 16, 1 << 18
"""Elements of a tensor that is packed into its offer, and of one that is not."""


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with observing(Recorder()) as recorder:
        yield recorder


def payload(key: str, size: int = SMALL) -> TensorTransferData:
    return TensorTransferData(key, {"h": torch.ones(size)})


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("scheme", ["shm", "zmq+ipc", "inproc"])
def test_a_transfer_is_seen_on_both_sides(
    scheme: str, size: int, sockets: str, recorder: Recorder
) -> None:
    url = f"{scheme}://{sockets}/link.sock" if scheme == "zmq+ipc" else f"{scheme}://seen"
    with (
        KVLink.serve(url, directory=sockets) as producer,
        KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
    ):
        receipt = producer.put(payload("a", size))
        with consumer.get("a", timeout=60) as data:
            assert isinstance(data, TensorTransferData)
        receipt.wait(timeout=60)
    put, get, ended = recorder.puts[0], recorder.gets[0], recorder.receipts[0]
    assert recorder.outcomes() == [["committed"], ["released"], ["received"], []]
    assert {event.scheme for event in (put, get, ended)} == {scheme}
    assert put.key == get.key == ended.key == "a"
    assert put.nbytes == get.nbytes == ended.nbytes == receipt.ledger.nbytes > 4 * size
    assert list(put.seconds) == ["plan", "reserve", "copy", "publish"]
    assert list(get.seconds) == ["wait", "view"]
    assert list(ended.seconds) == [*put.seconds, "delivery"]
    assert recorder.metadata == [{}]


def test_failures_of_puts(sockets: str, recorder: Recorder) -> None:
    with KVLink.serve("shm://failing", directory=sockets) as producer:
        producer.put(payload("a"))
        with pytest.raises(DuplicateKeyError):
            producer.put(payload("a"))
        producer.abort("a")
        with pytest.raises(DuplicateKeyError):
            producer.put_many([payload("b"), payload("b", LARGE)])
        stream = producer.open_stream("s", {"h": torch.ones(1)})
        stream.append({"h": torch.ones(1)})
        stream.fail("of the engine")
    assert recorder.outcomes()[0] == ["committed", "failed", "failed", "committed", "failed"]
    errors = [type(event.error) for event in recorder.puts if event.error is not None]
    assert errors == [DuplicateKeyError, DuplicateKeyError, TransferFailed]
    assert recorder.outcomes()[1] == ["failed", "failed"]
    assert all(isinstance(event.error, TransferFailed) for event in recorder.receipts)


def test_failures_of_gets(sockets: str, recorder: Recorder) -> None:
    with (
        KVLink.serve("shm://failing", directory=sockets) as producer,
        KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
    ):
        with pytest.raises(TransferTimeout):
            consumer.get("none", timeout=0)
        producer.fail("bad", "of the engine")
        with pytest.raises(TransferFailed):
            consumer.get("bad", timeout=60)
        receipt = producer.put(payload("plain"), digests=False)
        with pytest.raises(IntegrityError):
            consumer.get("plain", timeout=60, verify="full")
        until(lambda: receipt.done, "the payload is rejected")
    kinds = [type(event.error) for event in recorder.gets]
    assert kinds == [TransferTimeout, TransferFailed, IntegrityError]
    assert recorder.outcomes()[2] == ["failed"] * 3
    assert recorder.outcomes()[1] == ["failed"]


def test_a_payload_that_is_wrong_when_it_is_copied(sockets: str, recorder: Recorder) -> None:
    copier = TamperingCopier()
    with (
        KVLink.serve("shm://wrong", directory=sockets, copier=copier) as producer,
        KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
    ):
        producer.put(payload("right", LARGE))
        with consumer.get("right", timeout=60) as _:
            pass
        copier.tamper = partial(flip_bit, "tensors/h", 5)
        receipt = producer.put(payload("wrong", LARGE))
        got = consumer.get("wrong", timeout=60)
        with pytest.raises(IntegrityError):
            got.scatter([torch.empty(LARGE)])
        until(lambda: receipt.done, "the payload is rejected")
        got.release()
    assert recorder.outcomes() == [
        ["committed"] * 2,
        ["released", "failed"],
        ["received"] * 2,
        ["rejected"],
    ]
    assert list(recorder.copies[0].seconds) == ["scatter"]


def test_an_observer_that_raises_harms_nothing(
    sockets: str, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    raising = Raising()
    remove_observer(recorder)
    add_observer(raising)
    add_observer(recorder)
    add_observer(raising)
    try:
        with (
            caplog.at_level(logging.ERROR, "omni_kvlink"),
            KVLink.serve("shm://raising", directory=sockets) as producer,
            KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
        ):
            for key in ("a", "b"):
                receipt = producer.put(payload(key, LARGE))
                received = consumer.get(key, timeout=60)
                target = torch.empty(LARGE)
                received.scatter([target])
                received.release()
                receipt.wait(timeout=60)
    finally:
        remove_observer(raising)
    each = [["committed"], ["released"], ["received"], ["copied"]]
    assert recorder.outcomes() == [outcomes * 2 for outcomes in each]
    assert len(caplog.records) == 1


def test_a_log_record_keeps_no_payload(sockets: str, caplog: pytest.LogCaptureFixture) -> None:
    class RaisingGet(Observer):
        def on_get(self, event: TransferEvent) -> None:
            raise RuntimeError("of the observer's get")

    observer = RaisingGet()
    add_observer(observer)
    try:
        with (
            KVLink.serve("shm://logged", directory=sockets) as producer,
            KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
        ):
            receipt = producer.put(payload("a", LARGE))
            consumer.get("a", timeout=60).release()
            until(lambda: receipt.done, "the payload is released", timeout=20)
    finally:
        remove_observer(observer)
    [record] = caplog.records
    assert "of the observer's get" in record.getMessage()
    assert record.exc_info is None


def test_nothing_is_seen_after_it_was_removed(sockets: str, recorder: Recorder) -> None:
    with KVLink.serve("shm://removed", directory=sockets) as producer:
        receipt = producer.put(payload("a"))
        remove_observer(recorder)
        remove_observer(recorder)
        producer.put(payload("b"))
        producer.abort("a")
        assert receipt.done
    assert recorder.outcomes() == [["committed"], [], [], []]


def test_what_was_observed_is_in_no_cycle(sockets: str, recorder: Recorder) -> None:
    with (
        KVLink.serve("inproc://kept") as producer,
        KVLink.connect("inproc://kept", timeout=60) as consumer,
    ):
        gc.collect()
        gc.disable()
        try:
            receipt = producer.put(payload("a", LARGE))
            consumer.get("a", timeout=60).release()
            receipt.wait(timeout=60)
            producer.put(payload("b", LARGE))
            producer.abort("b")
            del receipt
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = [one for one in gc.garbage if isinstance(one, (TransferEvent, TransferFailed))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not found
    assert recorder.outcomes()[1] == ["released", "failed"]
