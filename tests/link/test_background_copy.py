"""`BackgroundGet` with `into`: layers are copied as they come, and none after the get has ended."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    ClosedError,
    IntegrityError,
    KVLink,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.connectors.runtime import consumer as runtime_consumer
from omni_kvlink.copier import TorchCopier
from omni_kvlink.lowlevel import BackgroundGet, CopyInto, GetPhase, LayerTargets, begin_get
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import NESTED, Recipe, fingerprint, hash_tensors
from omni_kvlink.testing.rig import until, until_freed, until_requested
from omni_kvlink.testing.stream_checks import LayerStream
from omni_kvlink.testing.tampering import TamperingCopier, flip_bit
from support.connectors.held_loops import loop_of
from support.link.ends import session_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVConsumer, KVProducer, ReceivedStream

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
DATA = Recipe("k", layers=3).make()
METADATA = {"kv": vars(DATA)["metadata"]}
URLS = {"inproc": "inproc://copy", "shm": "shm://copy", "zmq": "zmq+ipc://{root}/copy"}
ALL_LAYERS = ((0, 1), (2, 3), (4, 5))
"""The numbers of the tensors of each layer."""
OTHERS_BYTE = 0x5A
"""A byte of whoever is given the memory of the targets when the get has ended."""


class HoldingCopier(TorchCopier):
    """Copies out a layer when `may_copy` is set."""

    def __init__(self) -> None:
        self.copying, self.may_copy = threading.Event(), threading.Event()
        self.may_copy.set()

    def scatter(self, *arguments: Any) -> None:
        self.copying.set()
        assert self.may_copy.wait(60)
        super().scatter(*arguments)


class CopyOwner:
    """The owner of a get into tensors; a thread of its pool runs the copy."""

    def __init__(
        self, link: KVConsumer, threads: ThreadPoolExecutor, timeout: float = 60, **options: Any
    ):
        self.targets = [torch.zeros_like(dense(view)) for view in DATA.tensors()]
        self.counts = list[int]()
        self.copies = list[CopyInto]()
        self.errors = list[Exception]()
        self.get = BackgroundGet(
            "k",
            lambda timeout: link,
            partial(begin_get, streamed=True),
            timeout,
            submit=threads.submit,
            copy=self.copies.append,
            fail=self.errors.append,
            **{"into": self.targets, "copied": self._count, **options},
        )
        self.get.request()

    def has_ended(self) -> bool:
        return bool(self.copies or self.errors)

    def has_layer(self, layer: int) -> bool:
        """Whether a layer is in the targets, and its owner knows."""
        views = [self.targets[number] for number in ALL_LAYERS[layer]]
        expected = [DATA.tensors()[number] for number in ALL_LAYERS[layer]]
        return bool(self.counts) and layer < self.counts[-1] and same(views, expected)

    def error(self) -> Exception:
        until(self.has_ended, "it has ended")
        (error,) = self.errors
        assert not self.copies
        return error

    def _count(self, copies: CopyInto) -> None:
        self.counts.append(copies.count)


def has_begun(reader: CopyOwner) -> bool:
    return bool(reader.counts)


def same(one: Any, other: Any) -> bool:
    return hash_tensors(one) == hash_tensors(other)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(params=["inproc", "shm", "zmq"])
def pair(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    options: dict[str, Any] = {} if request.param == "zmq" else {"directory": sockets}
    with (
        KVLink.serve(URLS[request.param].format(root=sockets), **options) as producer,
        KVLink.connect(producer.url, timeout=60, copier=HoldingCopier(), **options) as consumer,
    ):
        yield producer, consumer


def copier_of(consumer: KVConsumer) -> HoldingCopier:
    copier = consumer._copier  # that of the fixture
    assert isinstance(copier, HoldingCopier)
    return copier


def check_another_reads(producer: KVProducer, consumer: KVConsumer) -> None:
    with consumer.get("k", timeout=60) as data:
        assert fingerprint(data) == fingerprint(DATA)
    del data
    until_freed(producer)


@pytest.mark.parametrize("is_put", [True, False])
def test_layers_are_copied_as_they_come(
    pair: tuple[KVProducer, KVConsumer], threads: ThreadPoolExecutor, is_put: bool
) -> None:
    producer, consumer = pair
    if is_put:
        receipt = producer.put(DATA)
        reader = CopyOwner(consumer, threads)
    else:
        reader, stream = CopyOwner(consumer, threads), LayerStream(producer, data=DATA)
        for layer in range(3):
            stream.write(("kv", layer))
            until(partial(reader.has_layer, layer), "the layer is copied")
            assert (reader.has_ended(), reader.get.is_read) == (False, False)
        receipt = stream.out.commit()
    until(reader.has_ended, "it has ended")
    assert not reader.errors
    assert same(reader.targets, DATA.tensors())
    assert (reader.get.phase, reader.get.is_read) == (GetPhase.CLAIMED, True)
    receipt.wait(timeout=60)
    if not is_put:
        assert reader.counts == [0, 1, 2, 3, 3], "and once when it is claimed"
    assert not reader.get.cancel()
    assert reader.get.is_read
    until_freed(producer)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_one_that_has_ended_needs_no_cyclic_collector(
    pair: tuple[KVProducer, KVConsumer], is_cancelled: bool
) -> None:
    """It has the link and its descriptors; servers run without that collector."""
    producer, consumer = pair
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as pool:
            reader = CopyOwner(consumer, pool)  # whose own methods the get calls
            if is_cancelled:
                assert reader.get.cancel()
            else:
                producer.put(DATA).wait(timeout=60)
                until(reader.has_ended, "it has ended")
        get = weakref.ref(reader.get)
        del reader
        until(lambda: get() is None, "nothing has it")
    finally:
        gc.enable()


def test_targets_that_are_made_for_what_comes(
    pair: tuple[KVProducer, KVConsumer], threads: ThreadPoolExecutor
) -> None:
    """By the names and shapes of the payload, or some of its layers, or rows of them."""
    producer, consumer = pair
    made = dict[str, torch.Tensor]()

    def by_shape(stream: ReceivedStream) -> list[torch.Tensor]:
        assert stream.metadata == METADATA
        made.update(
            {str(n): torch.empty_like(dense(v)) for n, v in enumerate(stream.payload.tensors())}
        )
        return list(made.values())

    def last_rows(stream: ReceivedStream) -> list[LayerTargets]:
        views = [dense(view)[1:] for view in stream.payload.tensors()[4:]]
        made.update({str(n): torch.zeros_like(view) for n, view in enumerate(views)})
        rows = range(1, 1 + len(views[0]))
        return [LayerTargets("kv", 2, list(made.values()), rows)]

    for into, first, numbers in ((by_shape, 0, range(6)), (last_rows, 1, range(4, 6))):
        made.clear()
        receipt = producer.put(DATA)
        reader = CopyOwner(consumer, threads, into=into)
        until(reader.has_ended, "it has ended")
        assert not reader.errors
        expected = [dense(DATA.tensors()[number])[first:] for number in numbers]
        assert same(list(made.values()), expected)
        receipt.wait(timeout=60)


def test_other_tensors_than_lists_of_layers(sockets: str) -> None:
    """`get` takes the function, too."""
    with (
        KVLink.serve(URLS["shm"], directory=sockets) as producer,
        KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
    ):
        data = NESTED.make()
        receipt, made = producer.put(data), list[torch.Tensor]()

        def into(stream: ReceivedStream) -> list[torch.Tensor]:
            made.extend(torch.empty_like(dense(view)) for view in stream.payload.tensors())
            return made

        consumer.get(data.request_id, timeout=60, into=into).release()
        assert same(made, data.tensors())
        receipt.wait(timeout=60)


@pytest.mark.parametrize("leaves_unread", [True, False])
@pytest.mark.parametrize("copies", [True, False], ids=["in a layer", "between layers"])
def test_cancelled_amid_the_copy(
    pair: tuple[KVProducer, KVConsumer],
    threads: ThreadPoolExecutor,
    leaves_unread: bool,
    copies: bool,
) -> None:
    """It ends when the layer is there, without the next one; then no target is written."""
    producer, consumer = pair
    reader, stream = CopyOwner(consumer, threads), LayerStream(producer, data=DATA, readers=2)
    copier = copier_of(consumer)
    stream.write(("kv", 0))
    until(partial(reader.has_layer, 0), "the layer is copied")
    if copies:
        copier.copying.clear()
        copier.may_copy.clear()
        stream.write(("kv", 1))
        assert copier.copying.wait(60)
    assert not reader.get.cancel(leaves_unread=leaves_unread)
    assert reader.get.phase is GetPhase.STOPPED
    assert reader.get.is_read != leaves_unread
    if copies:
        assert not reader.has_ended(), "a target may be written"
        copier.may_copy.set()
    assert "the get of 'k' was cancelled" in str(reader.error())
    assert isinstance(reader.errors[0], ClosedError)
    assert same(reader.targets[:2], DATA.tensors()[:2])
    assert not any(target.any() for target in reader.targets[4:])
    for target in reader.targets:
        target.view(torch.uint8).fill_(OTHERS_BYTE)
    stream.write(*list(stream.layers)[2 if copies else 1 :])
    receipt = stream.out.commit()
    for _ in range(1 + leaves_unread):
        consumer.get("k", timeout=60).release()
    receipt.wait(timeout=60)
    assert all(bool((target.view(torch.uint8) == OTHERS_BYTE).all()) for target in reader.targets)
    assert (len(reader.errors), len(reader.copies)) == (1, 0)


def test_cancelled_before_it_is_claimed(
    pair: tuple[KVProducer, KVConsumer], threads: ThreadPoolExecutor
) -> None:
    """Of a cancel and the end of the copy one counts, also when all bytes are there."""
    producer, consumer = pair
    gets, answers = list[BackgroundGet](), list[bool]()
    may_begin = threading.Event()

    def copied(copies: CopyInto) -> None:
        assert may_begin.wait(60)
        if copies.count == len(ALL_LAYERS):
            answers.append(gets[0].cancel())

    producer.put(DATA)
    owner = CopyOwner(consumer, threads, copied=copied)
    gets.append(owner.get)
    may_begin.set()
    assert isinstance(owner.error(), ClosedError)
    assert answers == [False], "the targets are there"
    assert not owner.get.is_read
    check_another_reads(producer, consumer)


def test_errors_end_it(pair: tuple[KVProducer, KVConsumer], threads: ThreadPoolExecutor) -> None:
    """Wrong targets and errors of the owner leave the payload to others."""
    producer, consumer = pair

    def refuse(_: object) -> Any:
        raise LookupError("no")

    for options, error in (
        ({"into": [torch.zeros(1)]}, SchemaError),
        ({"into": refuse}, LookupError),
        ({"copied": refuse}, LookupError),
    ):
        producer.put(DATA)
        assert isinstance(CopyOwner(consumer, threads, **options).error(), error)
        check_another_reads(producer, consumer)
    late = CopyOwner(consumer, threads, timeout=0.3)
    stream = LayerStream(producer, data=DATA)
    stream.write(("kv", 0))
    assert isinstance(late.error(), TransferTimeout)
    failed = CopyOwner(consumer, threads)
    until(lambda: failed.counts[-1:] == [1], "the layer is copied")
    stream.out.fail("the model has failed")
    assert isinstance(failed.error(), TransferFailed)
    assert not failed.targets[-1].any()
    with KVLink.serve("inproc://wrong", copier=(copier := TamperingCopier())) as wrong:
        copier.tamper = partial(flip_bit, "kv.0.key", 0)
        with KVLink.connect(wrong.url, timeout=60) as link:
            receipt = wrong.put(DATA)
            assert isinstance(CopyOwner(link, threads).error(), IntegrityError)
            with pytest.raises(TransferFailed, match="rejected"):
                receipt.wait(timeout=60)


def cut(consumer: KVConsumer) -> None:
    """Break a connection of ZMQ, and not its producer."""
    session = session_of(consumer)
    loop_of(session).call(partial(session.disconnect_in_loop, PeerLostError("it was cut")))


@pytest.mark.parametrize("allows", [True, False])
@pytest.mark.parametrize("when", ["waiting", "copying"])
def test_a_connection_that_breaks(
    sockets: str,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    allows: bool,
) -> None:
    """The payload is copied again from its start, unless its owner refuses."""
    # No setting: a busy machine may take longer to connect again than it allows.
    monkeypatch.setattr(runtime_consumer, "_RECONNECT_SECONDS", 60.0)
    attempts = list[CopyInto]()

    def copied(copies: CopyInto) -> None:
        if copies not in attempts:
            attempts.append(copies)
            if len(attempts) > 1 and not allows:
                raise TransferFailed("its layers are in use", key="k")

    with (
        KVLink.serve(URLS["zmq"].format(root=sockets)) as producer,
        KVLink.connect(producer.url, timeout=60) as consumer,
    ):
        reader = CopyOwner(consumer, threads, copied=copied)
        until_requested(producer, 1)
        if when == "waiting":
            cut(consumer)
            until(lambda: consumer.stats()["sessions"] == 2, "it has connected again")
            receipt = producer.put(DATA)
        else:
            stream = LayerStream(producer, data=DATA)
            stream.write(("kv", 0))
            until(lambda: same(reader.targets[:2], DATA.tensors()[:2]), "the layer is copied")
            reader.targets[0].zero_()  # it is written again
            cut(consumer)
            until(lambda: len(attempts) == 2, "it is copied again")
            stream.write(*list(stream.layers)[1:])
            receipt = stream.out.commit()
        if when == "copying" and not allows:
            assert "its layers are in use" in str(reader.error())
            consumer.get("k", timeout=60).release()
        else:
            until(reader.has_ended, "it has ended")
            assert not reader.errors
            assert same(reader.targets, DATA.tensors())
        receipt.wait(timeout=60)


def test_no_target_is_written_after_the_end(
    pair: tuple[KVProducer, KVConsumer], threads: ThreadPoolExecutor
) -> None:
    """A stream and a cancel that come together: whoever has the memory next keeps its bytes."""
    producer, consumer = pair
    endings = list[bool]()
    for number in range(60):
        reader, start = CopyOwner(consumer, threads), threading.Barrier(2)

        def write(start: threading.Barrier = start) -> Any:
            stream = LayerStream(producer, data=DATA)
            start.wait(60)
            stream.write()
            return stream.out.commit()

        with ThreadPoolExecutor(1) as writer:
            writing = writer.submit(write)
            if number % 3:
                until(partial(has_begun, reader), "it has begun")
            start.wait(60)
            is_cancelled = reader.get.cancel()
            if not is_cancelled:
                until(reader.has_ended, "it has ended")
            for target in reader.targets:
                target.view(torch.uint8).fill_(OTHERS_BYTE)
            receipt = writing.result(60)
        if not reader.get.is_read:
            consumer.get("k", timeout=60).release()
        receipt.wait(timeout=60)
        left = (bool((each.view(torch.uint8) == OTHERS_BYTE).all()) for each in reader.targets)
        assert all(left)
        assert [len(reader.copies), int(is_cancelled), len(reader.errors)].count(1) == 1
        endings.append(is_cancelled)
    assert not all(endings), "they come together"


def test_a_cancel_waits_for_no_layer(pair: tuple[KVProducer, KVConsumer]) -> None:
    """A cancelled get gives its thread back at once: a producer that stops writing keeps none."""
    producer, consumer = pair
    with ThreadPoolExecutor(1) as pool:
        first = CopyOwner(consumer, pool)
        stream = LayerStream(producer, data=DATA)
        until(partial(has_begun, first), "its thread waits for a layer")
        assert not first.get.cancel()
        until(first.has_ended, "it has ended, without a layer")
        second = CopyOwner(consumer, pool)
        stream.write()
        receipt = stream.out.commit()
        until(second.has_ended, "it has ended")
        assert not second.errors
        receipt.wait(timeout=60)
