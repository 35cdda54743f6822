"""ZMQ's edge-triggered descriptor: all messages are read, whatever consumes a wake-up."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from omni_kvlink import KVLink
from omni_kvlink.connectors.control.monitored_socket import MonitoredSocket
from omni_kvlink.connectors.protocol.messages import Failed, Get
from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.testing.rig import until
from support.connectors.held_loops import loop_of
from support.connectors.zmq_addresses import fresh_url
from support.connectors.zmq_unauthorized import greeted_peer
from support.link.ends import end_of, session_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Reaches into _socket: the edge of ZMQ's descriptor is lost by a read of the socket that its owner
# does not see.

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


def swallow(socket: zmq.Socket[bytes]) -> None:
    """Wait until a message is there, and consume its wake-up, as a send can."""
    until(lambda: bool(int(socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN)), "the message arrived")


def test_a_message_that_arrives_while_the_owner_sends(context: zmq.Context[Any]) -> None:
    received: list[bytes] = []
    other = context.socket(zmq.PAIR)
    was_sent = threading.Event()

    def on_idle() -> None:
        if not was_sent.is_set():
            was_sent.set()
            other.send(b"meanwhile")
            swallow(monitored.socket)

    loop = EventLoop("test")
    monitored = MonitoredSocket(
        context,
        zmq.PAIR,
        loop,
        lambda frames: received.append(frames[0].bytes),
        lambda event, value: None,
        on_idle,
        max_frame=1000,
    )
    monitored.socket.bind("inproc://test")
    other.connect("inproc://test")
    loop.call(monitored.watch)
    until(lambda: received == [b"meanwhile"], "it was read", 2)
    loop.call(monitored.close)
    loop.close()
    other.close(0)


def test_a_message_that_arrives_while_a_producer_sends(sockets: str) -> None:
    with KVLink.serve(fresh_url("tcp", sockets)) as producer, greeted_peer(producer.url) as peer:
        peer.send(Get(1, "first"))
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
        endpoint = end_of(producer)
        blocked, go_on = threading.Event(), threading.Event()

        def block() -> None:
            blocked.set()
            go_on.wait(60)
            swallow(endpoint.listeners[0]._socket.socket)

        endpoint.loop.call(block)
        assert blocked.wait(60)
        producer.fail("first", "failed by the test")  # the loop sends this, and must then read
        peer.send(Get(2, "second"))
        go_on.set()
        assert isinstance(peer.receive()[0], Failed)
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the second was read", 2)


def test_a_message_that_arrives_while_a_reader_sends(sockets: str) -> None:
    with (
        KVLink.serve(fresh_url("tcp", sockets)) as producer,
        KVLink.connect(producer.url, timeout=60) as reader,
    ):
        first = begin_get(reader, "first", timeout=60)
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
        session = session_of(reader)
        blocked, go_on = threading.Event(), threading.Event()

        def block() -> None:
            blocked.set()
            go_on.wait(60)
            swallow(session._socket.socket)

        loop_of(session).call(block)
        assert blocked.wait(60)
        second = begin_get(reader, "second", timeout=60)
        producer.fail("first", "failed by the test")
        go_on.set()
        assert first.future.exception(2) is not None
        second.cancel()
