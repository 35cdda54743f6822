"""`ReceivedBatch.scatter`: two threads share a large batch, and an error is one payload's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    IntegrityError,
    KVLink,
    Received,
    SchemaError,
    TensorTransferData,
    TransferFailed,
)
from omni_kvlink.link.received_batch import SHARED
from omni_kvlink.system import threads
from omni_kvlink.testing.rig import expect
from omni_kvlink.testing.tampering import TamperingCopier, flip_bit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink import KVConsumer, KVProducer, Receipt, ReceivedBatch
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

pytestmark = pytest.mark.usefixtures("leaves_nothing")
KEYS = [f"k{number}" for number in range(8)]
LARGE = SHARED // 4 // len(KEYS)
"""Floats of a payload, of which the batch is large; of one fewer, it is not."""


class Interrupted(BaseException):
    """What a signal handler may raise."""


@pytest.fixture
def copier() -> TamperingCopier:
    return TamperingCopier()


@pytest.fixture(params=["inproc", "shm"])
def ends(
    request: pytest.FixtureRequest, sockets: str, copier: TamperingCopier
) -> Iterator[tuple[KVProducer, KVConsumer]]:
    where = {"shm": f"?directory={sockets}"}.get(request.param, "")
    url = f"{request.param}://batch-scatter{where}"
    with (
        KVLink.serve(url, copier=copier, quota=4 * SHARED) as producer,
        KVLink.connect(url, timeout=60) as consumer,
    ):
        yield producer, consumer


def put(producer: KVProducer, floats: int = LARGE) -> tuple[list[torch.Tensor], list[Receipt]]:
    """Put a batch; return its tensors and receipts."""
    tensors = [torch.full((floats,), float(number)) for number in range(len(KEYS))]
    pairs = zip(KEYS, tensors, strict=True)
    return tensors, producer.put_many(
        [TensorTransferData(key, {"x": tensor}) for key, tensor in pairs]
    )


def blank(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [[torch.full_like(tensor, -1)] for tensor in tensors]


def get(consumer: KVConsumer) -> ReceivedBatch[Received]:
    return consumer.get_many(KEYS, timeout=60)


def are_equal(
    targets: Sequence[Sequence[torch.Tensor]], sent: Sequence[torch.Tensor]
) -> list[bool]:
    return [torch.equal(target, tensor) for [target], tensor in zip(targets, sent, strict=True)]


class Scatters:
    """Watches the scatters of received payloads; `meet` has the first of two threads meet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meet: bool):
        self.threads = list[str]()
        self.before: Callable[[], object] = object
        barrier, local, original = threading.Barrier(2), threading.local(), Received.scatter

        def scatter(received: Received, into: Any) -> None:
            if meet and not hasattr(local, "has_met"):
                local.has_met = True
                barrier.wait(60)
            self.threads.append(threading.current_thread().name)
            self.before()
            original(received, into)

        monkeypatch.setattr(Received, "scatter", scatter)


def test_two_threads_copy_a_large_batch(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    (sent, _), seen = put(ends[0]), Scatters(monkeypatch, meet=True)
    targets = blank(sent)
    with (batch := get(ends[1])):
        batch.scatter(targets)
    assert all(are_equal(targets, sent))
    assert len(seen.threads) == len(KEYS)
    assert set(seen.threads) == {threading.current_thread().name, "kvlink-scatter"}


def test_one_thread_copies_a_small_batch(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    (sent, _), seen = put(ends[0], LARGE // 2), Scatters(monkeypatch, meet=False)
    targets = blank(sent)
    with (batch := get(ends[1])):
        batch.scatter(targets)
    assert all(are_equal(targets, sent))
    assert set(seen.threads) == {threading.current_thread().name}


def test_no_second_thread_to_be_had(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, _ = put(ends[0])
    targets = blank(sent)

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with (batch := get(ends[1])), monkeypatch.context() as patch:
        patch.setattr(threads, "uninterrupted", refuse)
        batch.scatter(targets)
    assert all(are_equal(targets, sent))


@pytest.mark.parametrize("floats", [LARGE, 100])
@pytest.mark.parametrize("call", ["scatter", "scatter_each"])
def test_an_error_is_one_payloads(
    ends: tuple[KVProducer, KVConsumer], copier: TamperingCopier, call: str, floats: int
) -> None:
    """The others are copied; the producer of the wrong bytes learns it."""

    def tamper(manifest: Manifest, region: Region) -> None:
        if manifest.request_id == "k3":
            flip_bit(manifest.tensors[0].name, 0, manifest, region)

    copier.tamper = tamper
    sent, receipts = put(ends[0], floats)
    targets = blank(sent)
    targets[5] = [torch.zeros(floats + 1)]
    with (batch := get(ends[1])):
        if call == "scatter":
            expect(IntegrityError, batch.scatter, targets)
        else:
            errors = batch.scatter_each(targets)
            kinds = {3: IntegrityError, 5: SchemaError}
            assert [type(error) for error in errors] == [kinds.get(n, type(None)) for n in range(8)]
    others = [number for number in range(8) if number not in (3, 5)]
    assert all(are_equal([targets[n] for n in others], [sent[n] for n in others]))
    for number, receipt in enumerate(receipts):
        if number == 3:
            expect(TransferFailed, receipt.wait, timeout=60, mentions=("rejected",))
        else:
            receipt.wait(timeout=60)


def test_as_many_targets_as_payloads(ends: tuple[KVProducer, KVConsumer]) -> None:
    sent, _ = put(ends[0], 10)
    targets = blank(sent)
    with (batch := get(ends[1])):
        expect(SchemaError, batch.scatter, targets[1:], mentions=("7 targets", "8 payloads"))
    assert not any(are_equal(targets, sent))


@pytest.mark.parametrize("where", ["caller", "other"])
def test_a_fault_ends_all(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What interrupts a copy leaves the call when no thread copies any more."""
    (sent, _), seen = put(ends[0]), Scatters(monkeypatch, meet=True)
    mine = threading.current_thread()

    def interrupt() -> None:
        if (threading.current_thread() is mine) == (where == "caller"):
            raise Interrupted

    seen.before = interrupt
    with pytest.raises(Interrupted), (batch := get(ends[1])):
        batch.scatter(blank(sent))
    assert not [thread for thread in threading.enumerate() if thread.name == "kvlink-scatter"]
    get(ends[1]).release()
