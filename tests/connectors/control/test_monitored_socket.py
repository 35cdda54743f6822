"""ZMQ's edge-triggered descriptor: whatever swallows a wake-up, nothing is left unheard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from zmq_fixtures import fresh_url
from zmq_unauthorized import greeted

from omni_kvlink import KVLink
from omni_kvlink.connectors.control.monitored_socket import MonitoredSocket
from omni_kvlink.connectors.protocol.messages import Failed, Get
from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.testing.rig import until

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


def swallow(socket: zmq.Socket[bytes]) -> None:
    """Wait until a message is there, in a way that takes the wake-up with it, as a send can."""
    until(lambda: bool(socket.EVENTS & zmq.POLLIN), "the message arrived")


def test_what_comes_while_the_owner_speaks(context: zmq.Context[Any]) -> None:
    heard: list[bytes] = []
    other = context.socket(zmq.PAIR)
    said = threading.Event()

    def on_idle() -> None:
        if not said.is_set():
            said.set()
            other.send(b"meanwhile")
            swallow(port.socket)

    loop = EventLoop("test")
    port = MonitoredSocket(
        context,
        zmq.PAIR,
        loop,
        lambda frames: heard.append(frames[0].bytes),
        lambda event, value: None,
        on_idle,
        max_frame_nbytes=1000,
    )
    port.socket.bind("inproc://place")
    other.connect("inproc://place")
    loop.call(port.watch)
    until(lambda: heard == [b"meanwhile"], "it was heard", 2)
    loop.call(port.close)
    loop.stop()
    other.close(0)


def test_what_comes_while_a_producer_sends(sockets: str) -> None:
    with KVLink.serve(fresh_url("tcp", sockets)) as producer, greeted(producer.url) as peer:
        peer.send(Get(1, "first"))
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the want arrived")
        end = producer._end
        holding, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            holding.set()
            go_on.wait(5)
            swallow(end.listeners[0]._socket.socket)  # type: ignore[attr-defined]

        end.loop.call(hold)  # type: ignore[attr-defined]
        assert holding.wait(5)
        producer.fail("first", "so it goes")  # the loop will send this, and then must listen
        peer.send(Get(2, "second"))
        go_on.set()
        assert isinstance(peer.handle()[0], Failed)
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the second was heard", 2)


def test_what_comes_while_a_reader_sends(sockets: str) -> None:
    with (
        KVLink.serve(fresh_url("tcp", sockets)) as producer,
        KVLink.connect(producer.url, timeout=5) as reader,
    ):
        first = reader.begin_get("first", timeout=5)
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the want arrived")
        session = reader._end._session  # type: ignore[attr-defined]
        holding, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            holding.set()
            go_on.wait(5)
            swallow(session._socket.socket)

        session._loop.call(hold)
        assert holding.wait(5)
        second = reader.begin_get("second", timeout=5)
        producer.fail("first", "so it goes")
        go_on.set()
        assert first.future.exception(2) is not None
        second.cancel()
