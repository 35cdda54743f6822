"""A connection breaks while its producer lives: pending gets are repeated and succeed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import zmq

from omni_kvlink import KVLink, PeerLostError
from omni_kvlink.aio import AsyncKVConsumer, AsyncKVLink
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.messages import Cancel, encode, own_hello
from omni_kvlink.connectors.runtime import consumer as runtime_consumer
from omni_kvlink.lowlevel import begin_get, can_retry
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, sized
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink, ThreadPeer
from omni_kvlink.testing.rig import expect, until
from omni_kvlink.testing.stream_checks import LayerStream
from support.connectors.held_loops import loop_of
from support.connectors.zmq_addresses import free_port, fresh_url
from support.link.ends import end_of, peers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink import KVProducer
    from support.faults.harness import Start

# Reaches into _RECONNECT_SECONDS, _disconnect_in_loop, _on_hello_in_loop, _send_hello_in_loop,
# _socket, _ungreeted: a connection is lost at one moment of its handshake, as the socket and its
# owner are at it.

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

UCX = pytest.param(
    "ucx",
    marks=pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is missing"),
)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine needs more than half a second to connect again."""
    monkeypatch.setattr(runtime_consumer, "_RECONNECT_SECONDS", 60.0)


class Cable:
    """Forwards connections to a port; `cut` ends the present ones.

    After `hold_after` one connection forwards only so many bytes of the producer; `held` is set.
    """

    def __init__(self, port: int):
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends = list[socket.socket]()
        self._left: int | None = None
        self.held = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_after(self, nbytes: int) -> None:
        self._left = nbytes

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            self._ends += [near, far]
            for pair in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket, down: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if down and self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        self._left = None
                        self.held.set()
                        while one.recv(1 << 16):
                            pass
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        one.close()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def producer(port: int) -> Iterator[KVProducer]:
    with KVLink.serve(f"zmq+tcp://127.0.0.1:{port}") as link:
        yield link


@pytest.fixture
def cable(port: int) -> Iterator[Cable]:
    cable = Cable(port)
    yield cable
    cable.close()


@pytest.fixture
def reader(producer: KVProducer, cable: Cable) -> Iterator[RemoteLink]:
    threads = ThreadPeer(LinkCommands())
    threads.call("connect", link="r", url=f"zmq+tcp://127.0.0.1:{cable.port}", timeout=60)
    yield RemoteLink(threads, "r")
    threads.close()


def waiting(producer: KVProducer) -> bool:
    return bool(producer.stats()["transfers"]["waiting"] == 1)


def was_cut(producer: KVProducer, sessions: int) -> bool:
    """Whether the producer lost its reader, which may be waiting again in another session."""
    return not waiting(producer) or sessions > 1


def is_session(reader: RemoteLink, number: int) -> bool:
    return bool(reader.call("stats")["sessions"] == number)


def test_a_get_that_waits(producer: KVProducer, cable: Cable, reader: RemoteLink) -> None:
    get = reader.submit("get", key="k", timeout=PATIENCE, verify="full")
    for session in range(2, 5):
        until(lambda: waiting(producer), "the get arrived")
        cable.cut()
        until(partial(is_session, reader, session), "it connected again")
    until(lambda: waiting(producer), "it asked again")
    receipt = producer.put(Recipe("k").make())
    assert get.result(PATIENCE) == fingerprint(Recipe("k").make())
    receipt.wait(timeout=60)


@pytest.mark.parametrize("transport", ["tcp", UCX])
@pytest.mark.parametrize("when", ["before", "sent", "answered", "connected-again"])
def test_a_connection_that_is_lost_around_hello(
    monkeypatch: pytest.MonkeyPatch, port: int, cable: Cable, transport: str, when: str
) -> None:
    """The handshake has succeeded, and nobody answers `Hello`: the next connection carries it."""
    scheme, query = ("zmq+tcp", "") if transport == "tcp" else ("ucx", "?trusted_network=1")
    send_hello, cuts = ControlSession._send_hello_in_loop, list[int]()

    def cut_first(session: ControlSession) -> None:
        def has(event: int) -> bool:
            assert session._socket is not None
            return bool(int(session._socket.socket.getsockopt(zmq.EVENTS)) & event)

        if when != "before" or len(cuts) == 3:
            send_hello(session)
        if len(cuts) == 3:
            return
        cuts.append(0)
        if when in ("answered", "connected-again"):
            until(lambda: has(zmq.POLLIN), "the answer came")
        if when == "answered":  # ZMQ drops it just after it reports the end
            session._on_event_in_loop(zmq.EVENT_DISCONNECTED, 0)
            loop_of(session).call(cable.cut)
            return
        cable.cut()
        until(lambda: not has(zmq.POLLOUT), "ZMQ noticed")
        if when == "connected-again":
            until(lambda: has(zmq.POLLOUT), "ZMQ connected again")
        if when == "before":
            send_hello(session)

    monkeypatch.setattr(ControlSession, "_send_hello_in_loop", cut_first)
    with (
        KVLink.serve(f"{scheme}://127.0.0.1:{port}{query}") as producer,
        KVLink.connect(f"{scheme}://127.0.0.1:{cable.port}{query}", timeout=60) as reader,
    ):
        assert len(cuts) == 3
        producer.put(Recipe("k").make())
        with reader.get("k", timeout=60) as data:
            assert fingerprint(data) == fingerprint(Recipe("k").make())


@contextlib.contextmanager
def next_descriptor(number: int) -> Iterator[None]:
    """Wait until a descriptor is closed, and have this process open it next."""
    fillers = list[int]()
    try:
        while not fillers or fillers[-1] != number:
            fillers.append(os.dup(0))
            if fillers[-1] > number:  # not closed yet
                os.close(fillers.pop())
        os.close(fillers.pop())
        yield
    finally:
        for filler in fillers:
            os.close(filler)


@pytest.mark.parametrize("order", ["first", "unnoticed", "last"])
def test_a_hello_that_is_read_after_its_connection_ended(
    sockets: str, start: Start, order: str
) -> None:
    """The connection that has got its descriptor meanwhile is greeted all the same."""
    path, held, busy = f"ipc://{sockets}/late.sock", threading.Event(), threading.Event()
    with KVLink.serve(f"zmq+{path}") as producer:
        end = end_of(producer)
        (listener,) = end.listeners
        ungreeted, reader = listener._ungreeted, RemoteLink(start(), "r")
        if order == "unnoticed":
            listener._socket.send = unnoticed_once(listener._socket.send)
        elif order == "last":
            listener._on_hello_in_loop = first_last(listener._on_hello_in_loop)
        with zmq.Context() as context, context.socket(zmq.DEALER) as bare:
            with bare.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                bare.connect(path)
                assert monitor.poll(int(PATIENCE * 1000))
                bare.disable_monitor()
            (descriptor,) = ungreeted
            end.loop.call(partial(hold, held, busy))
            assert held.wait(PATIENCE)
            bare.send(encode(own_hello()))
        with next_descriptor(descriptor):
            connecting = reader.submit("connect", url=producer.url, timeout=60)
            until(lambda: is_open(descriptor), "the next connection was accepted")
        busy.set()
        connecting.result(PATIENCE)
        receipt = producer.put(Recipe("k").make())
        assert reader.call("get", key="k", timeout=60) == fingerprint(Recipe("k").make())
        receipt.wait(timeout=60)


def test_a_refused_peer_is_not_greeted_again(sockets: str) -> None:
    path = f"ipc://{sockets}/again.sock"
    with (
        KVLink.serve(f"zmq+{path}") as producer,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as bare,
    ):
        bare.connect(path)
        for message in (encode(own_hello()), b"no message", encode(own_hello()), encode(Cancel(1))):
            bare.send(message)

        def is_read() -> bool:
            stats = producer.stats()
            return bool(stats["refused"].get("bad message") == 2 or stats["readers"])

        until(lambda: producer.stats()["refused"].get("bad message", 0) > 0, "it was refused")
        until(is_read, "the last message was read")
        assert producer.stats()["readers"] == 0


def hold(held: threading.Event, end: threading.Event) -> None:
    held.set()
    end.wait(PATIENCE)


def unnoticed_once(send: Callable[..., None]) -> Callable[..., None]:
    """Have the first message vanish, as before ZMQ has noticed that its peer disconnected."""
    calls = list[int]()

    def replacement(*arguments: Any, **options: Any) -> None:
        calls.append(0)
        if len(calls) > 1:
            send(*arguments, **options)

    return replacement


def first_last(on_hello: Callable[..., None]) -> Callable[..., None]:
    """Have the first `Hello` read after the second: ZMQ orders those of one connection only."""
    kept = list[Any]()

    def replacement(*arguments: Any) -> None:
        kept.insert(0, arguments)
        if len(kept) > 1:
            while kept:
                on_hello(*kept.pop(0))

    return replacement


def is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def test_a_get_whose_bytes_are_coming(
    producer: KVProducer, cable: Cable, reader: RemoteLink
) -> None:
    data = sized("k", 8 << 20).make()
    cable.hold_after(1 << 20)
    get = reader.submit("get", key="k", timeout=PATIENCE, verify="full")
    until(lambda: waiting(producer), "the get arrived")
    receipt = producer.put(data)
    assert cable.held.wait(PATIENCE)
    cable.cut()
    assert get.result(PATIENCE) == fingerprint(data)
    assert producer.stats()["transfers"]["redelivered"] == 1
    receipt.wait(timeout=60)


@pytest.mark.parametrize("how", ["put", "stream"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_get_into_tensors_whose_bytes_are_coming(
    producer: KVProducer, cable: Cable, is_async: bool, how: str
) -> None:
    """Before the payload is delivered, and when one of its layers is copied already."""
    data = sized("k", 8 << 20).make()
    targets = [torch.zeros_like(dense(view)) for view in data.tensors()]
    url = f"zmq+tcp://127.0.0.1:{cable.port}"
    with KVLink.connect(url, timeout=PATIENCE) as consumer, ThreadPoolExecutor(1) as pool:

        def get() -> None:
            options: dict[str, Any] = {"timeout": PATIENCE, "into": targets}
            if is_async:
                asyncio.run(AsyncKVConsumer(consumer).get("k", **options)).release()
            else:
                consumer.get("k", **options).release()

        getting = pool.submit(get)
        until(lambda: waiting(producer), "the get arrived")
        if how == "put":
            cable.hold_after(1 << 20)
            receipt = producer.put(data)
            assert cable.held.wait(PATIENCE)
            cable.cut()
        else:
            stream = LayerStream(producer, data=data)
            stream.write(("kv", 0))
            first = hash_tensors(stream.layers["kv", 0])
            until(lambda: hash_tensors(targets[:2]) == first, "a layer is copied")
            cable.cut()
            stream.write(*list(stream.layers)[1:])
            receipt = stream.out.commit()
        getting.result(PATIENCE)
        assert hash_tensors(targets) == hash_tensors(data.tensors())
        assert producer.stats()["transfers"]["redelivered"] == 1
        receipt.wait(timeout=60)


def test_a_stream_that_was_not_begun(
    producer: KVProducer, cable: Cable, reader: RemoteLink
) -> None:
    stream = reader.submit("stream_get", key="k", timeout=PATIENCE)
    until(lambda: waiting(producer), "the get arrived")
    cable.cut()
    until(lambda: was_cut(producer, reader.call("stats")["sessions"]), "the cut was seen")
    receipt = producer.put(Recipe("k").make())
    stream.result(PATIENCE)
    assert reader.peer.call("wait_stream", key="k", timeout=60) == fingerprint(Recipe("k").make())
    reader.peer.call("release", key="k")
    receipt.wait(timeout=60)


def test_in_asyncio(producer: KVProducer, cable: Cable) -> None:
    async def get() -> object:
        url = f"zmq+tcp://127.0.0.1:{cable.port}"
        async with await AsyncKVLink.connect(url, timeout=60) as link:
            task = asyncio.create_task(link.get("k", timeout=PATIENCE))
            await asyncio.to_thread(until, lambda: waiting(producer), "the get arrived")
            cable.cut()
            await asyncio.to_thread(
                until, lambda: was_cut(producer, link.stats()["sessions"]), "it was cut"
            )
            producer.put(Recipe("k").make())
            with await task as data:
                return fingerprint(data)

    assert asyncio.run(get()) == fingerprint(Recipe("k").make())


def test_a_restarted_producer_is_not_asked_again(
    port: int, producer: KVProducer, cable: Cable, reader: RemoteLink
) -> None:
    """The payload died with the producer: the get fails at once, not at its deadline."""
    get = reader.submit("get", key="k", timeout=PATIENCE)
    until(lambda: waiting(producer), "the get arrived")
    cable.cut()
    producer.close()
    with KVLink.serve(f"zmq+tcp://127.0.0.1:{port}") as successor:
        expect(PeerLostError, lambda: get.result(PATIENCE))
        assert successor.stats()["transfers"]["waiting"] == 0


@pytest.mark.parametrize("transport", ["tcp", "ipc", "shm", "inproc"])
def test_a_successor_is_reached_and_not_asked(transport: str, sockets: str) -> None:
    """It serves at the same address, and is another run: it does not have the payload."""
    options = {"directory": sockets}
    url = "shm://life" if transport == "shm" else "inproc://life"
    if transport in ("tcp", "ipc"):
        url, options = fresh_url(transport, sockets), {}
    producer = KVLink.serve(url, **options)  # type: ignore[arg-type]
    with KVLink.connect(url, timeout=60, **options) as reader:  # type: ignore[arg-type]
        pending = begin_get(reader, "k", timeout=60)
        until(lambda: waiting(producer), "the get arrived")
        producer.close()
        expect(PeerLostError, pending.wait, timeout=60)
        until(lambda: not reader.stats()["connected"], "the session is over")
        with KVLink.serve(url, **options):  # type: ignore[arg-type]
            assert not can_retry(reader, pending, timeout=60)
            assert reader.stats()["sessions"] == 2


def test_a_cut_off_reader_of_shared_memory(sockets: str) -> None:
    with (
        KVLink.serve("shm://b", directory=sockets) as producer,
        KVLink.connect("shm://b", timeout=60, directory=sockets) as reader,
    ):
        get_id = threading.Thread(target=lambda: reader.get("k", timeout=PATIENCE).release())
        get_id.start()
        until(lambda: waiting(producer), "the get arrived")
        end = end_of(producer)
        (peer,) = peers_of(producer)
        end.loop.call(lambda: end.listeners[0]._disconnect_in_loop(peer))
        until(lambda: reader.stats()["sessions"] == 2, "it came back")
        producer.put(Recipe("k").make()).wait(timeout=60)
        get_id.join(60)
