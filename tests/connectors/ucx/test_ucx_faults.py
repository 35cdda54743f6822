"""`ucx://` between real processes, killed and frozen: exact bytes, or a typed error."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVLink, KVProducer, PeerLostError, TransferTimeout
from omni_kvlink.connectors import ucx
from omni_kvlink.testing.caches import fingerprint, sized
from omni_kvlink.testing.peer_harness import PATIENCE, ProcessPeer, RemoteLink
from omni_kvlink.testing.rig import expect, until, until_freed
from support.connectors.ucx_stops import HUGE, HUGE_NBYTES, done_or, in_use, stop_amid
from support.connectors.zmq_addresses import free_port
from support.faults.frozen import freeze
from support.faults.harness import Field, Start, expect_reason, kill

if TYPE_CHECKING:
    from collections.abc import Iterator

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

BIG = sized("k", 3 << 20)


@pytest.fixture
def field(socket_dir: str) -> Iterator[Field]:
    field = Field(socket_dir, url=f"ucx://127.0.0.1:{free_port()}?trusted_network=1")
    yield field
    field.close()


def test_a_deadline_passes_while_bytes_come(field: Field, start: Start) -> None:
    """Memory that UCX may still write to is not reused until the sender has continued."""
    field.options["quota"] = 256 << 20
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    waiting = stop_amid(target, producer, reader, timeout=2.0)
    expect(TransferTimeout, lambda: waiting.result(PATIENCE), mentions=("bytes have come",))
    until(lambda: reader.call("stats")["ucx"]["quarantined"] == 1, "quarantine")
    stats = reader.call("stats")
    assert stats["memory"]["used"] >= HUGE_NBYTES
    assert stats["ucx"]["quarantined_nbytes"] >= HUGE_NBYTES
    os.kill(target.process.pid, signal.SIGCONT)
    until(lambda: reader.call("stats")["memory"]["used"] == 0, "the reader's memory is free")
    assert reader.call("stats")["ucx"]["quarantined"] == 0
    assert reader.call("get", key="k", timeout=60, verify="full") == fingerprint(HUGE.make())


def test_a_link_closes_while_its_producer_is_frozen(field: Field, start: Start) -> None:
    field.options["quota"] = 256 << 20
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    waiting = stop_amid(target, producer, reader, timeout=PATIENCE)
    reader.call("close")
    assert waiting.exception(PATIENCE) is not None


def test_frozen_producer(impatient: None, field: Field, start: Start) -> None:
    """Calls end in time; the producer is disconnected, and found again when it continues."""
    target = start()
    producer, reader = field.serve_at(target), field.connect()
    waiting = reader.submit("get", key="k", timeout=PATIENCE)
    until(lambda: producer.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    freeze(target.process.pid)
    expect_reason(
        TransferTimeout,
        "does not answer",
        lambda timeout: KVLink.connect(field.url, timeout=timeout),
    )
    expect(PeerLostError, lambda: waiting.result(60), mentions=("'k'",))
    until(lambda: not reader.call("stats")["ucx"]["endpoints"], "UCX has dropped the endpoint")
    again = reader.submit("get", key="k", timeout=PATIENCE)
    os.kill(target.process.pid, signal.SIGCONT)
    producer.call("put", recipe=BIG.to_dict())
    assert again.result(PATIENCE) == fingerprint(BIG.make())


def freeze_amid(target: ProcessPeer, producer: KVProducer, frozen: RemoteLink) -> None:
    """Stop a reader when it has received a part of a payload."""
    for _ in range(20):
        producer.put(HUGE.make())
        waiting = frozen.submit("get", key="k", timeout=PATIENCE)
        until(partial(done_or, waiting, lambda: in_use(producer.stats())), "bytes leave")
        freeze(target.process.pid)
        time.sleep(0.3)  # less than the heartbeat timeout
        if in_use(producer.stats()):
            return
        os.kill(target.process.pid, signal.SIGCONT)
        waiting.result(PATIENCE)
        until(lambda: not producer.stats()["transfers"]["live"], "it was read")
    raise AssertionError("the reader could not be stopped in time")


def test_a_reader_is_frozen_amid_its_bytes(impatient: None, field: Field, start: Start) -> None:
    """Another reader gets them; the memory is not reused before UCX has freed it."""
    field.options["quota"] = 256 << 20
    target = start()
    producer = field.serve()
    frozen, reader = field.connect_at(target), field.connect()
    freeze_amid(target, producer, frozen)
    assert reader.call("get", key="k", timeout=60, verify="full") == fingerprint(HUGE.make())
    until(lambda: not producer.stats()["transfers"]["live"], "it was read")
    assert producer.stats()["ucx"]["quarantined"] == 1
    assert producer.stats()["memory"]["used"] >= HUGE_NBYTES
    kill(target)
    until_freed(producer)
