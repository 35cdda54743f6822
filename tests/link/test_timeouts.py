"""Every timeout of the public API: NaN and negative seconds are refused, infinity is no limit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVConsumer, KVLink, KVProducer
from omni_kvlink.aio import AsyncKVConsumer, AsyncKVLink, AsyncKVProducer
from omni_kvlink.lookup import LookupConsumer, PrefixStore
from omni_kvlink.lowlevel import begin_get, can_retry, open_stream
from omni_kvlink.testing.caches import Recipe

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("leaves_nothing")
DATA = Recipe("k", layers=2).make()


def calls(producer: KVProducer, consumer: KVConsumer) -> dict[str, Callable[[float], object]]:
    """Every call that takes a time, as a function of it; none of them waits."""
    receipt, store = producer.put(DATA, ttl=float("inf")), PrefixStore(producer)
    aproducer, aconsumer = AsyncKVProducer(producer), AsyncKVConsumer(consumer)
    pending, lookup = begin_get(consumer, "p", timeout=0.0), LookupConsumer(producer, [], model="m")
    url, run = producer.url, asyncio.run
    stream = consumer.stream_get("k", timeout=float("inf"))

    def open_again(seconds: float) -> object:
        return open_stream(consumer, stream.delivery, started=0.0, timeout=seconds)

    return {
        "connect": lambda seconds: KVLink.connect(url, timeout=seconds),
        "put": lambda seconds: producer.put(DATA, timeout=seconds),
        "put, ttl": lambda seconds: producer.put(DATA, ttl=seconds),
        "put direct": lambda seconds: producer.put(DATA, timeout=seconds, direct=True),
        "allocate": lambda seconds: producer.allocate(DATA, timeout=seconds),
        "stream_put": lambda seconds: producer.stream_put(DATA, timeout=seconds),
        "stream_put, ttl": lambda seconds: producer.stream_put(DATA, ttl=seconds),
        "get": lambda seconds: consumer.get("k", timeout=seconds),
        "stream_get": lambda seconds: consumer.stream_get("k", timeout=seconds),
        "receipt": lambda seconds: receipt.wait(timeout=seconds),
        "begin_get": lambda seconds: begin_get(consumer, "k", timeout=seconds),
        "can_retry": lambda seconds: can_retry(consumer, pending, timeout=seconds),
        "wait pending": lambda seconds: pending.wait(timeout=seconds),
        "open_stream": open_again,
        "wait_for_layer": lambda seconds: stream.wait_for_layer(0, timeout=seconds),
        "wait": lambda seconds: stream.wait(timeout=seconds),
        "aio connect": lambda seconds: run(AsyncKVLink.connect(url, timeout=seconds)),
        "aio put": lambda seconds: run(aproducer.put(DATA, timeout=seconds)),
        "aio wait": lambda seconds: run(aproducer.wait(receipt, timeout=seconds)),
        "aio get": lambda seconds: run(aconsumer.get("k", timeout=seconds)),
        "aio stream_get": lambda seconds: run(aconsumer.stream_get("k", timeout=seconds)),
        "store": lambda seconds: store.select([1], wait=True, timeout=seconds),
        "lookup": lambda seconds: lookup.select([1], timeout=seconds),
    }


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, -float("inf")])
@pytest.mark.parametrize("ends", ["inproc", "shm"], indirect=True)
def test_what_is_no_time_is_refused(ends: tuple[KVProducer, KVConsumer], seconds: float) -> None:
    for name, call in calls(*ends).items():
        with pytest.raises(ValueError, match=r"timeout=|ttl"):
            print(name, call(seconds))
    ends[1].close()


@pytest.mark.parametrize("ends", ["inproc", "shm"], indirect=True)
def test_infinity_is_no_limit(ends: tuple[KVProducer, KVConsumer], sockets: str) -> None:
    producer, consumer = ends
    inf: dict[str, Any] = {"timeout": float("inf")}
    KVLink.connect(producer.url, directory=sockets, **inf).close()
    receipt = producer.put(DATA, ttl=float("inf"), **inf)
    consumer.get("k", **inf).release()
    receipt.wait(**inf)
    producer.allocate(DATA, **inf).release()
    receipt = producer.put(DATA)
    with consumer.stream_get("k", **inf) as stream:
        stream.wait_for_layer(1, **inf)
        stream.wait(**inf)
    asyncio.run(AsyncKVProducer(producer).wait(receipt, **inf))
