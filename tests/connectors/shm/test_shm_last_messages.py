"""Messages that a reader sent before it closed are handled, although it left some unread."""

from __future__ import annotations

import os
import threading

import pytest

from omni_kvlink import KVLink
from omni_kvlink.connectors.protocol.messages import Get, Offer, Outcome, Release
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.rig import until, until_freed
from omni_kvlink.testing.stream_checks import LayerStream
from support.connectors.shm_unauthorized import greeted
from support.link.ends import end_of

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.mark.parametrize("outcome", ["read", "rejected"])
def test_layers_that_were_not_read_hide_no_release(sockets: str, outcome: Outcome) -> None:
    """Linux reports unread messages as a reset of the connection, before the reader's last ones."""
    with KVLink.serve("shm://last", directory=sockets) as producer:
        stream = LayerStream(producer, data=Recipe("s", layers=8).make())
        with greeted(producer.stats()["socket"]) as peer:
            peer.send(Get(1, "s", True))
            until(lambda: producer.stats()["transfers"]["leased"] == 1, "it was offered")
            _, fds = peer.receive()
            offer, _ = peer.receive()
            assert isinstance(offer, Offer)
            stream.write()
            unblock = threading.Event()  # both events are seen at once, as on a busy machine

            def block() -> None:
                unblock.wait(60)

            assert isinstance(end_of(producer), PooledProducer)
            end_of(producer).loop.call(block)
            peer.send(Release(1, offer.epoch, outcome))
            peer.sock.close()
            unblock.set()
        _close(fds)
        until(lambda: producer.stats()["transfers"]["leased"] == 0, "its end was seen")
        found = producer.stats()["transfers"]
        assert (found["leased"], found["redelivered"], found["pinned"]) == (0, 0, 0)
        assert found["failed"] == (outcome == "rejected")
        stream.out.fail("enough") if outcome == "rejected" else stream.out.commit().wait(timeout=60)
        until_freed(producer)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
