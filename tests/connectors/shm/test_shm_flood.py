"""A peer that sends without a pause has its turns: no other peer, call or deadline waits longer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import ClosedError, KVLink, TensorTransferData
from omni_kvlink.connectors.protocol.messages import (
    MAX_BATCH,
    Cancel,
    Failed,
    Get,
    Message,
    encode_all,
    own_hello,
)
from omni_kvlink.connectors.runtime.turns import TURN
from omni_kvlink.connectors.shm import listener as shm_listener
from omni_kvlink.connectors.shm.rendezvous import NamedListener
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.testing.rig import until
from support.connectors.held_loops import loop_of, num_calls, paused
from support.connectors.shm_unauthorized import Raw, dialled, greeted
from support.link.ends import end_of, session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Reaches into _on_messages: how many messages one turn hands over is counted there.


pytestmark = pytest.mark.usefixtures("leaves_nothing")

PATIENCE = 60.0
MOST = TURN + MAX_BATCH
"""Messages of the longest turn."""
HALF = range(MAX_BATCH // 2)
VOID: list[Message] = [*(Get(i, f"g{i}") for i in HALF), *map(Cancel, HALF)]
"""A batch that takes longer to handle than to send."""


def fill(peer: Raw, messages: Sequence[Message]) -> int:
    """Send batches until the socket takes no more; return how many messages that were."""
    (data,), sent = encode_all(messages), 0
    peer.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            peer.send(data)
            sent += len(messages)
    return sent


def count_by_peer(monkeypatch: pytest.MonkeyPatch, end: Any) -> list[tuple[object, int]]:
    """Record the peer of each call of the producer's `handle`, and how many messages it has."""
    handled, handle = list[tuple[object, int]](), end.handle

    def record(peer: object, *messages: Message) -> None:
        handled.append((peer, len(messages)))
        handle(peer, *messages)

    monkeypatch.setattr(end, "handle", record)
    return handled


def has_handled(handled: list[tuple[object, int]], count: int) -> bool:
    return sum(each for _, each in handled) == count


def test_an_honest_get_waits_for_one_turn_of_each_flooder(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(KVLink.serve("shm://flood", directory=sockets))
        end = end_of(producer)
        path = producer.stats()["socket"]
        flooders = [stack.enter_context(greeted(path)) for _ in range(3)]
        reader = stack.enter_context(
            KVLink.connect("shm://flood", directory=sockets, timeout=PATIENCE)
        )
        handled = count_by_peer(monkeypatch, end)
        producer.put(TensorTransferData("k", {"ids": torch.arange(5)}))
        with paused(end.loop):
            sent = sum(fill(flooder, VOID) for flooder in flooders)
            assert sent > 9 * MOST, "the sockets hold more than the turns"
            pending = begin_get(reader, "k", timeout=PATIENCE)
        pending.wait(timeout=PATIENCE).release()
        until(lambda: sum(count for _, count in handled) >= sent + 1, "all is handled")
        first_of_honest = next(at for at, (_, count) in enumerate(handled) if count == 1)
        before = Counter[object]()
        for peer, count in handled[:first_of_honest]:
            before[peer] += count
        assert max(before.values(), default=0) <= 2 * MOST
        assert set(producer.stats()["throttled"]) == {f"pid {os.getpid()}"}
        assert producer.stats()["throttled"][f"pid {os.getpid()}"] > 3


def test_a_peer_that_never_pauses_is_paused(sockets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many turns in a row, until all that it sent is handled."""
    monkeypatch.setattr(shm_listener, "MANY_TURNS", 2)
    with KVLink.serve("shm://flood", directory=sockets) as producer:
        end = end_of(producer)
        given, defer = list[bool](), end.loop.defer

        def record(function: Callable[[], None], *, paused: bool = False) -> None:
            given.append(paused)
            defer(function, paused=paused)

        monkeypatch.setattr(end.loop, "defer", record)
        handled = count_by_peer(monkeypatch, end)
        with greeted(producer.stats()["socket"]) as flooder:
            for _ in range(2):
                before = len(given)
                with paused(end.loop):
                    sent = fill(flooder, [Cancel(1)] * MAX_BATCH)
                until(partial(has_handled, handled, sent), "all is handled")
                assert given[before : before + 4] == [False, False, True, True]
                handled.clear()


def test_close_waits_for_one_turn_of_each_flooder(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(KVLink.serve("shm://flood", directory=sockets))
        end = end_of(producer)
        path = producer.stats()["socket"]
        flooders = [stack.enter_context(greeted(path)) for _ in range(3)]
        handled = count_by_peer(monkeypatch, end)
        closing = threading.Thread(target=producer.close)
        with paused(end.loop):
            sent = sum(fill(flooder, [Cancel(1)] * MAX_BATCH) for flooder in flooders)
            closing.start()
            until(lambda: num_calls(end.loop) >= 2, "close is called")
        closing.join()
        assert sent > 9 * MOST
        assert sum(count for _, count in handled) <= 4 * MOST


def test_a_reader_of_a_flooding_producer_closes(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = NamedListener(os.path.join(sockets, "flood.sock"))
    listener.sock.settimeout(PATIENCE)
    connected = list[Any]()

    def connect() -> None:
        connected.append(KVLink.connect("shm://flood", directory=sockets, timeout=PATIENCE))

    connecting = threading.Thread(target=connect)
    connecting.start()
    sock, _ = listener.sock.accept()
    with sock, contextlib.closing(listener):
        peer = Raw(sock)
        peer.receive()
        peer.send(own_hello())
        connecting.join()
        (reader,) = connected
        session = session_of(reader)
        handled, on_messages = list[int](), session._on_messages

        def record(messages: Sequence[Message], fd: int) -> None:
            handled.append(len(messages))
            on_messages(messages, fd)

        monkeypatch.setattr(session, "_on_messages", record)
        pending = begin_get(reader, "k", timeout=PATIENCE)
        closing = threading.Thread(target=reader.close)
        with paused(loop_of(session)):
            sent = fill(peer, [Failed(7, "none", "failed")] * MAX_BATCH)
            closing.start()
            until(lambda: num_calls(loop_of(session)) >= 1, "close is called")
        closing.join()
        with pytest.raises(ClosedError):
            pending.wait(timeout=PATIENCE)
        assert sent > 3 * MOST
        assert sum(handled) <= 2 * MOST


def test_what_a_producer_sent_without_a_pause_is_all_received(sockets: str) -> None:
    """The rest of a turn wakes nobody: the reader goes on by itself, and counts it."""
    with (
        KVLink.serve("shm://many", directory=sockets) as producer,
        KVLink.connect("shm://many", directory=sockets, timeout=PATIENCE) as reader,
    ):
        pending = [begin_get(reader, f"k{i}", timeout=PATIENCE) for i in range(20 * TURN)]
        until(lambda: producer.stats()["transfers"]["waiting"] == len(pending), "all wait")
        session = session_of(reader)
        with paused(loop_of(session)):
            for i in range(len(pending)):
                producer.fail(f"k{i}", "failed by the test")
        for each in pending:
            assert each.future.exception(PATIENCE) is not None
        until(lambda: reader.stats()["throttled"] > 0, "it was throttled")


def test_a_child_of_a_reader_that_ended_holds_nobody_up(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket's copy, here of this process, sends on as fast as is received."""
    (void,) = encode_all([Cancel(1)] * MAX_BATCH)
    with KVLink.serve("shm://flood", directory=sockets) as producer:
        end = end_of(producer)
        path = producer.stats()["socket"]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            reader = os.fork()
            if reader == 0:
                with contextlib.suppress(BaseException), dialled(path) as peer:
                    peer.send(own_hello())
                    peer.receive()
                    socket.send_fds(theirs, [b"copy"], [peer.sock.fileno()])
                    theirs.recv(1)
                os._exit(0)
            _, (copy,), _, _ = socket.recv_fds(ours, 4, 1)
            with socket.socket(fileno=copy) as child:
                former = end.handle

                def handle(peer: object, *messages: Message) -> None:
                    former(peer, *messages)
                    with contextlib.suppress(OSError):
                        child.send(void)

                monkeypatch.setattr(end, "handle", handle)
                with paused(end.loop):
                    child.send(void)
                    ours.send(b"x")
                    os.waitpid(reader, 0)
                until(lambda: producer.stats()["readers"] == 0, "the reader is gone")
                with pytest.raises(BrokenPipeError):
                    child.send(void)
