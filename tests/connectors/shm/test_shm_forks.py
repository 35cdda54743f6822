"""Forked processes: a child's copies of a link neither keep it alive nor end it."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from omni_kvlink import PeerLostError, TransferTimeout
from omni_kvlink.connectors.protocol.messages import encode, own_hello
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import expect, until
from support.faults.harness import Field, Start, forked_twice, kill

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_fork_of_a_producer(pooled: Field, start: Start) -> None:
    """A child cannot use the link, does not disturb it, and does not hide its parent's death."""
    target = start()
    producer, reader = pooled.serve_at(target), pooled.connect()
    producer.call("put", recipe=Recipe("k").to_dict())
    answers = producer.call("fork", linger=2 * PATIENCE)
    child = int(answers.pop("pid"))
    assert answers.pop("close") == ""
    assert answers.pop("get") == "AttributeError"  # a producer has no such method
    assert set(answers.values()) == {"ClosedError"}, answers
    assert reader.call("get", key="k", timeout=60) == fingerprint(Recipe("k").make())
    waiting = reader.submit("get", key="w", timeout=PATIENCE)
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    kill(target)
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    again = pooled.serve()  # the name is free, though the child is still there
    receipt = again.put(Recipe("w").make())
    assert reader.call("get", key="w", timeout=60) == fingerprint(Recipe("w").make())
    receipt.wait(timeout=60)
    os.kill(child, signal.SIGKILL)  # an error if it was not there to the end


def test_fork_of_a_reader(pooled: Field, start: Start) -> None:
    target = start()
    producer, reader = pooled.serve(), pooled.connect_at(target)
    other = pooled.connect()
    receipt = producer.put(Recipe("k").make())
    reader.call("hold", key="k", timeout=60)
    answers = reader.call("fork", linger=2 * PATIENCE)
    child = int(answers.pop("pid"))
    assert answers.pop("close") == ""
    assert answers.pop("put") == answers.pop("fail") == "AttributeError"
    assert set(answers.values()) == {"ClosedError"}, answers
    # Time for a release by the child's copy to arrive.
    expect(TransferTimeout, lambda: receipt.wait(timeout=0.1), mentions=("leased",))
    kill(target)
    waiting = other.submit("get", key="k", timeout=PATIENCE)
    assert waiting.result(PATIENCE) == fingerprint(Recipe("k").make())
    receipt.wait(timeout=60)
    os.kill(child, signal.SIGKILL)  # an error if it was not there to the end


def test_death_is_seen_behind_a_copied_socket(pooled: Field) -> None:
    """A process that was forked without Python's hooks holds the connection open."""
    producer = pooled.serve()
    path = producer.stats()["socket"]

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(path)
        sock.send(encode(own_hello()))
        sock.recv(65536)
        return sock

    with forked_twice(connect) as kill_child:
        until(lambda: producer.stats()["readers"] == 1, "it connected")
        kill_child()
        until(lambda: producer.stats()["readers"] == 0, "its death was seen")


def test_death_is_seen_behind_a_copied_listener(pooled: Field) -> None:
    path = os.path.join(pooled.options["directory"], "field.sock")

    def serve() -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"{path}.draft")
        listener.listen()
        os.rename(f"{path}.draft", path)  # it must not be found before it listens
        sock, _ = listener.accept()
        sock.recv(65536)
        sock.send(encode(own_hello()))
        listener.close()
        return sock

    with forked_twice(serve) as kill_child:
        until(lambda: os.path.exists(path), "it listens")
        reader = pooled.connect()
        waiting = reader.submit("get", key="k", timeout=PATIENCE)
        until(lambda: reader.call("stats")["waiting"] == 1, "the get waits")
        kill_child()
        expect(PeerLostError, lambda: waiting.result(PATIENCE))
