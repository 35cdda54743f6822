"""Text that is no UTF-8: escaped in a reason, refused in an address, an error where it arrives."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

import msgspec
import pytest

from omni_kvlink import KVLink, TransferFailed, WireError
from omni_kvlink.connectors.protocol.messages import (
    MAX_TEXT,
    Abort,
    Refused,
    decode,
    encode,
    shorten,
)
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.rig import expect, until
from support.connectors.zmq_addresses import fresh_url
from support.connectors.zmq_unauthorized import greeted_peer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVConsumer, KVProducer

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
LONE = "bad \udcff name \ud800"
ESCAPED = r"bad \udcff name \ud800"


@pytest.mark.parametrize("reason", [LONE, LONE * 1000, "\udcff" * MAX_TEXT])
def test_reasons(reason: str) -> None:
    """A reason that was shortened can be sent."""
    sent = Abort("k", shorten(reason))
    assert decode(encode(sent)) == sent
    assert shorten(LONE) == ESCAPED


def test_a_message_with_a_lone_surrogate_is_none() -> None:
    data = encode(Abort("k", "surrogate")).replace(b"surrogate", b"surrog\xed\xa0\x80")
    with pytest.raises(WireError):
        decode(data)


@pytest.fixture(params=["inproc", "shm", "tcp", "ipc"])
def ends(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    url = f"{request.param}://text-{os.getpid()}"
    if request.param in ("tcp", "ipc"):
        url = fresh_url(request.param, sockets)
    with (
        KVLink.serve(url, quota=8 << 20, directory=sockets) as producer,
        KVLink.connect(url, timeout=60, quota=8 << 20, directory=sockets) as reader,
    ):
        yield producer, reader


def test_a_link_outlives_such_a_reason(ends: tuple[KVProducer, KVConsumer]) -> None:
    """The other side gets the reason, and the next payload."""
    producer, reader = ends
    producer.fail("one", LONE)
    error = expect(TransferFailed, lambda: reader.get("one", timeout=60))
    assert "bad " in str(error)
    stream = producer.stream_put(Recipe("two").make())
    stream.fail(LONE)
    expect(TransferFailed, lambda: reader.get("two", timeout=60))
    receipt = producer.put(Recipe("three").make())
    reader.abort("three", LONE)
    expect(TransferFailed, lambda: receipt.wait(timeout=60))
    producer.put(Recipe("last").make())
    reader.get("last", timeout=60).release()


def test_a_host_with_such_a_name(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: LONE)
    producer, reader = ends
    producer.put(Recipe("k").make())
    reader.get("k", timeout=60).release()


def test_a_peer_that_sends_one(sockets: str) -> None:
    """It is refused and counted, and a name of its own in the Hello as well."""
    with KVLink.serve(fresh_url("tcp", sockets)) as producer:
        with greeted_peer(producer.url) as peer:
            peer.send(msgspec.msgpack.encode(["Abort", "k", "x"])[:-1] + b"\xff")
            assert isinstance(peer.receive()[0], Refused)
        assert producer.stats()["refused"]["bad message"] == 1
        until(lambda: producer.stats()["readers"] == 0, "it is gone")


@pytest.mark.parametrize("url", ["zmq+tcp://h\udcff:7000", "zmq+ipc:///tmp/\udcff/a.sock"])
def test_addresses(url: str) -> None:
    """They are refused before a thread of the link sees them."""
    with pytest.raises(ValueError, match="UTF-8"):
        KVLink.serve(url)
    with pytest.raises(ValueError, match="UTF-8"):
        KVLink.connect(url, timeout=1)
