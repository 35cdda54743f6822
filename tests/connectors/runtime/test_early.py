"""Transports that send bytes send those of a large payload while it is still being copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVLink, TransferFailed
from omni_kvlink.connectors.protocol.layer_table import LayerTable
from omni_kvlink.copier import TorchCopier
from omni_kvlink.link import put_operation as sending
from omni_kvlink.link.direct_put import DirectPut
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink, ThreadPeer
from omni_kvlink.testing.rig import expect, until, until_requested
from support.connectors.zmq_addresses import fresh_url
from support.link.ends import use_copier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_kvlink import KVProducer
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
RECIPE = Recipe("k", layers=9, tokens=100)


class Halting(TorchCopier):
    """A copier that fails, or waits until the reader has a lease, before the third gather."""

    def __init__(self, producer: KVProducer, error: Exception | None):
        self._producer, self._error, self._calls = producer, error, 0

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region, **options: float
    ) -> list[str]:
        self._calls += 1
        if self._calls == 3:
            until(lambda: self._producer.stats()["transfers"]["leased"] == 1, "it was begun")
            if self._error is not None:
                raise self._error
        return super().gather(sources, manifest, region, **options)


@pytest.fixture(params=["tcp", "ipc"])
def producer(
    request: pytest.FixtureRequest, sockets: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KVProducer]:
    monkeypatch.setattr(sending, "FIRST_STEP_NBYTES", 1024)
    with KVLink.serve(fresh_url(request.param, sockets), copier="torch") as link:
        yield link


@pytest.fixture
def reader(producer: KVProducer) -> Iterator[RemoteLink]:
    threads = ThreadPeer(LinkCommands())
    threads.call("connect", link="r", url=producer.url, timeout=60)
    yield RemoteLink(threads, "r")
    threads.close()


def halt(producer: KVProducer, error: Exception | None = None) -> None:
    use_copier(Halting(producer, error), producer)


def test_a_reader_has_the_first_tensors_before_the_last_are_copied(
    producer: KVProducer, reader: RemoteLink
) -> None:
    halt(producer)
    get = reader.submit("get", key="k", timeout=PATIENCE, verify="full")
    until_requested(producer, 1)
    receipt = producer.put(RECIPE.make())
    assert get.result(PATIENCE) == fingerprint(RECIPE.make())
    receipt.wait(timeout=60)


def test_a_put_that_fails_is_reported(producer: KVProducer, reader: RemoteLink) -> None:
    """The waiting get fails within milliseconds, and the key can be put again."""
    halt(producer, MemoryError("no more"))
    get = reader.submit("get", key="k", timeout=PATIENCE)
    until_requested(producer, 1)
    with pytest.raises(MemoryError):
        producer.put(RECIPE.make())
    expect(TransferFailed, lambda: get.result(PATIENCE), mentions=("gave it up",))
    receipt = producer.put(RECIPE.make())
    assert reader.call("get", key="k", timeout=60, verify="full") == fingerprint(RECIPE.make())
    receipt.wait(timeout=60)


def test_nothing_is_announced_without_a_waiting_get(
    producer: KVProducer, monkeypatch: pytest.MonkeyPatch, reader: RemoteLink
) -> None:
    begun = list[object]()
    monkeypatch.setattr(LayerTable, "begin", lambda *arguments: begun.append(arguments))
    producer.put(RECIPE.make())
    assert reader.call("get", key="k", timeout=60, verify="full") == fingerprint(RECIPE.make())
    assert not begun


def test_steps_cover_every_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is so long that a reader who copies at the same speed ends far behind the last."""
    plan = RECIPE.make().plan(digests=True)
    nbytes = [spec.nbytes for spec in plan.tensors]
    monkeypatch.setattr(sending, "FIRST_STEP_NBYTES", 2 * nbytes[0])
    steps = list(sending.announcement_steps(plan))
    assert [number for step in steps for number in step] == list(range(len(nbytes)))
    assert [len(step) for step in steps[:3]] == [2, 4, 4]
    assert {len(step) for step in steps[1:-1]} == {4}


def test_a_direct_put_whose_link_is_closed_while_it_computes_digests(
    producer: KVProducer, reader: RemoteLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce = sending.CopiedPut.announce

    def announce_closed(*arguments: Any) -> None:
        producer.close()
        announce(*arguments)

    monkeypatch.setattr(DirectPut, "announce", announce_closed)
    get = reader.submit("get", key="k", timeout=PATIENCE)
    until_requested(producer, 1)
    with pytest.raises(TransferFailed, match="is closed"):
        producer.put(RECIPE.make(), direct=True)
    assert get.exception(PATIENCE) is not None
