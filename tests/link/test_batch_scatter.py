"""`ReceivedBatch.scatter`: two threads share a large batch, and an error is that of one payload."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

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
from omni_kvlink.link.batch_copies import SHARED
from omni_kvlink.system import threads
from omni_kvlink.testing.rig import expect
from omni_kvlink.testing.tampering import TamperingCopier, flip_bit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink import KVConsumer, KVProducer, Receipt, ReceivedBatch
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

pytestmark = pytest.mark.usefixtures("leaves_nothing")
T = TypeVar("T")
KEYS = [f"k{number}" for number in range(8)]
LARGE = SHARED // 4 // len(KEYS)
"""Floats of each payload of a large batch."""


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


def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Call it outside the main thread, where a second thread may help."""
    with ThreadPoolExecutor(1, "caller") as pool:
        return pool.submit(call, *arguments).result()


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
        in_thread(batch.scatter, targets)
    assert all(are_equal(targets, sent))
    assert len(seen.threads) == len(KEYS)
    assert set(seen.threads) == {"caller_0", "kvlink-scatter"}


@pytest.mark.parametrize("where", ["small batch", "main thread", "device"])
def test_the_caller_alone(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Where a second thread gains nothing, or its copies could come at a wrong time."""
    floats = LARGE // 2 if where == "small batch" else LARGE
    (sent, _), seen = put(ends[0], floats), Scatters(monkeypatch, meet=False)
    targets = blank(sent)
    if where == "device":
        targets[7] = [torch.empty(floats, device="meta")]
    with (batch := get(ends[1])):
        call = batch.scatter_each
        errors = call(targets) if where == "main thread" else in_thread(call, targets)
    assert all(are_equal(targets[:7], sent[:7]))
    assert errors[:7] == [None] * 7
    assert isinstance(errors[7], SchemaError) is (where == "device")
    assert set(seen.threads) == {"MainThread" if where == "main thread" else "caller_0"}


def test_no_second_thread_to_be_had(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, _ = put(ends[0])
    targets, refused = blank(sent), list[None]()

    def refuse(*_: Any) -> None:
        refused.append(None)
        raise RuntimeError("can't start new thread")

    def copy(batch: ReceivedBatch[Received]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threads, "uninterrupted", refuse)
            batch.scatter(targets)

    with (batch := get(ends[1])):
        in_thread(copy, batch)
    assert refused
    assert all(are_equal(targets, sent))


@pytest.mark.parametrize("copier_name", ["native", "torch"])
def test_tensors_of_inference_mode(
    sockets: str, monkeypatch: pytest.MonkeyPatch, copier_name: str
) -> None:
    """The second thread writes to them, too, and is not in that mode, which is of a thread."""
    url, _ = f"shm://batch-scatter?directory={sockets}", Scatters(monkeypatch, meet=True)

    def copy(batch: ReceivedBatch[Received]) -> list[list[torch.Tensor]]:
        with torch.inference_mode():
            targets = blank(sent)
            batch.scatter(targets)
            return targets

    with (
        KVLink.serve(url, quota=4 * SHARED) as producer,
        KVLink.connect(url, timeout=60, copier=copier_name) as consumer,
    ):
        sent, _ = put(producer)
        with (batch := get(consumer)):
            assert all(are_equal(in_thread(copy, batch), sent))


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
            in_thread(expect, IntegrityError, batch.scatter, targets)
        else:
            errors = in_thread(batch.scatter_each, targets)
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
    alive = list[str]()

    def interrupt() -> None:
        if (threading.current_thread().name == "caller_0") == (where == "caller"):
            raise Interrupted

    def copy(batch: ReceivedBatch[Received]) -> None:
        try:
            batch.scatter(blank(sent))
        finally:
            alive.extend(thread.name for thread in threading.enumerate())

    seen.before = interrupt
    with pytest.raises(Interrupted), (batch := get(ends[1])):
        in_thread(copy, batch)
    assert "caller_0" in alive
    assert "kvlink-scatter" not in alive
    get(ends[1]).release()
