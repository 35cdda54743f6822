"""A release reaches the producer before the next get returns: a reader killed then has read it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from omni_kvlink import KVLink
from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.protocol.get_table import GetRequest
from omni_kvlink.connectors.protocol.messages import Message, Release
from omni_kvlink.connectors.shm.consumer import ShmConsumer, ShmSession
from omni_kvlink.testing.caches import sized
from support.connectors.held_loops import loop_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# Reaches into _channel, _session: the order in which one thread sends and receives is seen at the
# channel alone.

NBYTES = 40_000


def test_release_precedes_the_next_get(tmp_path: Path) -> None:
    """The loop receives the offer and finds the release of the payload before only afterwards."""
    order, idle = list[str](), threading.Event()
    entered, opened = threading.Event(), threading.Event()
    with KVLink.serve("shm://order", directory=str(tmp_path), inline=0) as producer:
        first = producer.put(sized("first", NBYTES, seed=1).make())
        producer.put(sized("second", NBYTES, seed=2).make())
        consumer = ShmConsumer("order", Options(directory=str(tmp_path)))
        consumer.connect(60)
        session = consumer._session
        assert isinstance(session, ShmSession)
        channel, sent = session._channel, session._channel.send_all
        received = channel.receive

        def receive(turn: float) -> Iterator[tuple[list[Message], int]]:
            entered.set()
            opened.wait()
            yield from received(turn)

        def send_all(messages: Sequence[Message]) -> None:
            if any(isinstance(message, Release) for message in messages):
                order.append("release")
            sent(messages)

        [pending] = consumer.begin([GetRequest("first")], timeout=60)
        held = pending.wait(timeout=60)
        loop_of(session).call(idle.set)
        assert idle.wait(60)  # it receives nothing
        channel.receive, channel.send_all = receive, send_all  # type: ignore[method-assign, assignment]
        [following] = consumer.begin([GetRequest("second")], timeout=60)
        following.future.add_done_callback(lambda _: order.append("offer"))
        assert entered.wait(60)
        region = held.region
        held.release()
        del region  # the last view: its finalizer leaves the release to the loop
        opened.set()
        second = following.wait(timeout=60)
        assert order == ["release", "offer"]
        first.wait(timeout=60)
        second.release()
        consumer.close()
