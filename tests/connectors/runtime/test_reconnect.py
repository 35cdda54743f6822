"""A connection breaks while its producer lives: pending gets are repeated and succeed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from zmq_fixtures import free_port, fresh_url

from omni_kvlink import KVLink, PeerLostError
from omni_kvlink.aio import AsyncKVLink
from omni_kvlink.connectors.runtime import consumer as runtime_consumer
from omni_kvlink.lowlevel import begin_get, can_retry
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.memory_checks import sized
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink, ThreadPeer
from omni_kvlink.testing.rig import expect, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVProducer

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


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
        end: Any = producer._end
        (peer,) = end.listeners[0]._peers
        end.loop.call(lambda: end.listeners[0]._disconnect(peer))
        until(lambda: reader.stats()["sessions"] == 2, "it came back")
        producer.put(Recipe("k").make()).wait(timeout=60)
        get_id.join(60)
