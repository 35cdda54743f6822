"""Requests that the socket does not take are sent later, whoever receives meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink import KVLink
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.connectors.shm.consumer import ShmConsumer, ShmSession
from omni_kvlink.lowlevel import begin_get, open_delivery
from omni_kvlink.testing.caches import fingerprint, sized
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import until
from support.connectors.held_loops import is_asleep, leader_of, loop_of
from support.link.ends import end_of, session_of

if TYPE_CHECKING:
    from omni_kvlink.connectors.base import PendingGet

# Reaches into _channel: whether the socket takes no more is known to the reader's end of it alone.

NBYTES = 4096


def wait(began: threading.Event, event: threading.Event) -> None:
    began.set()
    event.wait(PATIENCE)


def test_a_get_that_receives_does_not_hold_up_its_own_request(socket_dir: str) -> None:
    """The request waits in the reader's queue when its thread begins to receive."""
    url = f"shm://backlog?directory={socket_dir}"
    blocked, reads = threading.Event(), threading.Event()
    with KVLink.serve(url) as producer, KVLink.connect(url, timeout=PATIENCE) as reader:
        end, consumer = end_of(producer), end_of(reader)
        assert isinstance(end, PooledProducer)
        assert isinstance(consumer, ShmConsumer)
        session = session_of(reader)
        assert isinstance(session, ShmSession)
        end.loop.call(partial(wait, blocked, reads))
        assert blocked.wait(PATIENCE)  # or the producer would read while the socket is filled
        others: list[PendingGet] = []
        while not session._channel.has_backlog:
            others.append(begin_get(reader, f"other-{len(others)}", timeout=PATIENCE))
        last = begin_get(reader, "last", timeout=PATIENCE)
        producer.put(sized("last", NBYTES, seed=1).make())
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(last.wait, timeout=PATIENCE)
            until(lambda: leader_of(session) != 0, "the get receives")
            until(lambda: is_asleep(loop_of(session)), "the loop has nothing to do")
            reads.set()
            delivery = waits.result()
        with open_delivery(reader, delivery, started=0.0, verify="full") as data:
            assert fingerprint(data) == fingerprint(sized("last", NBYTES, seed=1).make())
        for pending in others:
            pending.cancel()
