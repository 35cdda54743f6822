"""An exception of a signal handler inside ZMQ's own calls: pyzmq raises it after each frame."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import zmq

from omni_kvlink import ClosedError, KVLink, PeerLostError, TensorTransferData
from omni_kvlink.aio import AsyncKVConsumer
from omni_kvlink.connectors.control.listener import ControlListener
from omni_kvlink.lowlevel import begin_get, open_delivery
from omni_kvlink.testing.rig import until, until_freed, until_requested
from support.connectors.held_loops import loop_of
from support.connectors.zmq_addresses import fresh_url
from support.link.ends import end_of, session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink import KVConsumer, KVProducer
    from omni_kvlink.connectors.control.peer import PeerConnection

# Reaches into _frames, _socket, _watched: an interrupt comes within one message, when the caller
# reads the socket.


@pytest.fixture(params=["tcp", "ipc"])
def pair(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    with (
        KVLink.serve(fresh_url(request.param, sockets)) as producer,
        KVLink.connect(producer.url, timeout=60) as consumer,
    ):
        yield producer, consumer


def payload(number: int) -> TensorTransferData:
    return TensorTransferData(f"k{number}", {"h": torch.arange(20) + number})


def interrupt_after(monkeypatch: pytest.MonkeyPatch, method: str, calls: int) -> None:
    """Raise KeyboardInterrupt in this thread once ZMQ has sent or received so many frames."""
    real, left = getattr(zmq.Socket, method), [calls]

    def cut(socket: Any, *arguments: Any, **options: Any) -> Any:
        found = real(socket, *arguments, **options)
        if threading.current_thread() is threading.main_thread():
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
        return found

    monkeypatch.setattr(zmq.Socket, method, cut)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_a_put_that_is_cut_within_its_message(
    pair: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    """Its offer is sent again, and what follows it arrives."""
    producer, consumer = pair
    waiting = begin_get(consumer, "k0", timeout=60)
    until_requested(producer, 1)
    is_blocked, is_over = threading.Event(), threading.Event()
    loop = end_of(producer).loop
    loop.call(is_blocked.set)
    loop.call(is_over.wait)  # so that the caller sends
    is_blocked.wait()
    with monkeypatch.context() as patch:
        interrupt_after(patch, "send", frames)
        with pytest.raises(KeyboardInterrupt):
            producer.put(payload(0))
        is_over.set()
    with open_delivery(consumer, waiting.wait(timeout=60), started=0.0) as data:
        assert torch.equal(*data.tensors(), *payload(0).tensors())  # type: ignore[arg-type]
    producer.put(payload(1))
    with consumer.get("k1", timeout=60) as data:
        assert torch.equal(*data.tensors(), *payload(1).tensors())  # type: ignore[arg-type]
    del data
    until_freed(producer)
    assert consumer.stats()["sessions"] == 1


@pytest.mark.parametrize("frames", [1, 2])
def test_a_get_that_is_cut_within_its_message(
    pair: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    """The frame is lost: the connection is made anew, and the payload is offered again."""
    producer, consumer = pair
    producer.put(payload(9))
    consumer.get("k9", timeout=60).release()
    session = session_of(consumer)

    def put_once_requested() -> None:
        until_requested(producer, 1)
        until(lambda: session._socket.fd not in loop_of(session)._watched, "the caller receives")
        producer.put(payload(0))

    timer = threading.Thread(target=put_once_requested)
    timer.start()
    with monkeypatch.context() as patch:
        interrupt_after(patch, "recv", frames)
        with pytest.raises(KeyboardInterrupt):
            consumer.get("k0", timeout=60)
    timer.join()
    for number in range(2):
        if number:
            producer.put(payload(number))
        with consumer.get(f"k{number}", timeout=60) as data:
            assert torch.equal(*data.tensors(), *payload(number).tensors())  # type: ignore[arg-type]
        del data
    until_freed(producer)
    assert consumer.stats()["sessions"] == 2


def read_awaited(consumer: KVConsumer) -> Any:
    """The same read of an asyncio consumer."""
    return asyncio.run(AsyncKVConsumer(consumer).read_stream("s", timeout=60)).stream


@pytest.mark.parametrize(
    "read", [lambda consumer: consumer.read_stream("s", timeout=60), read_awaited]
)
def test_a_stream_is_requested_again_over_a_new_connection(
    pair: tuple[KVProducer, KVConsumer], read: Callable[[KVConsumer], Any]
) -> None:
    producer, consumer = pair
    session = session_of(consumer)
    chunk = {"h": torch.arange(3)}

    def cut_and_write() -> None:
        until_requested(producer, 1)
        loop_of(session).call(partial(session.disconnect_in_loop, PeerLostError("it was cut")))
        with producer.open_stream("s", chunk) as stream:
            stream.append(chunk)

    writing = threading.Thread(target=cut_and_write)
    writing.start()
    with read(consumer) as stream:
        assert [one.data["h"].tolist() for one in stream] == [[0, 1, 2]]
    writing.join()
    assert consumer.stats()["sessions"] == 2


def test_an_offer_whose_payload_has_ended_holds_up_no_other(
    pair: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = pair
    waiting = begin_get(consumer, "k0", timeout=60)
    until_requested(producer, 1)
    is_blocked, is_over = threading.Event(), threading.Event()
    loop = end_of(producer).loop
    loop.call(is_blocked.set)
    loop.call(is_over.wait)  # so that the caller sends
    is_blocked.wait()

    real, failing = ControlListener._frames, list[Any]()

    def ended(self: ControlListener, peer: PeerConnection, message: Any) -> Any:
        if not failing or message is failing[0]:
            failing.append(message)
            raise ClosedError("it has ended")
        return real(self, peer, message)

    monkeypatch.setattr(ControlListener, "_frames", ended)
    with pytest.raises(ClosedError):
        producer.put(payload(0))
    is_over.set()
    producer.put(payload(1))
    with consumer.get("k1", timeout=60) as data:
        assert torch.equal(*data.tensors(), *payload(1).tensors())  # type: ignore[arg-type]
    waiting.cancel()
