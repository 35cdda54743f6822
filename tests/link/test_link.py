"""`KVLink` as its users see it; what every connector must do is in the conformance kit."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
import warnings
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    ClosedError,
    KVCacheBundle,
    KVCacheTransferData,
    KVConsumer,
    KVLink,
    KVProducer,
    SchemaError,
    TensorTransferData,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.payload.manifest import Manifest, decode_header
from omni_kvlink.payload.views import dense
from omni_kvlink.system import waits
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import expect, until
from support.link.ends import end_of

if TYPE_CHECKING:
    from omni_kvlink.connectors.base import PendingGet

pytestmark = pytest.mark.usefixtures("leaves_nothing")
_numbers = itertools.count()


def test_options_in_the_url(sockets: str) -> None:
    url = f"shm://o?mode=sealed&quota=1048576&directory={sockets}"
    with KVLink.serve(url) as producer:
        stats = producer.stats()
        assert stats["mode"] == "sealed"
        assert stats["memory"]["quota"] == 1 << 20
        with KVLink.connect(url, timeout=60):
            pass


def test_explicit_copier_must_exist() -> None:
    with pytest.raises(ValueError, match="copier='magic': wanted 'auto'"):
        KVLink.serve("inproc://copier", copier="magic")


def test_repr_says_what_it_is(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    assert "KVProducer" in repr(producer)
    assert "KVConsumer" in repr(consumer)
    consumer.close()
    assert "closed" in repr(consumer)
    receipt = producer.put(Recipe("k").make())
    assert "'k': committed" in repr(receipt)


def test_forgotten_link_is_loud_and_closed(sockets: str) -> None:
    link = KVLink.serve("shm://forgotten", directory=sockets)
    with pytest.warns(ResourceWarning, match="shm://forgotten was not closed"):
        del link
    until(lambda: not os.listdir(sockets), "its loop has closed it")
    KVLink.serve("shm://forgotten", directory=sockets).close()


FORGOTTEN = """
import sys, warnings
warnings.simplefilter("ignore")
from omni_kvlink import KVLink
from omni_kvlink.testing.caches import Recipe
producer = KVLink.serve(sys.argv[1])
consumer = KVLink.connect(producer.url, timeout=60)
producer.put(Recipe("k").make())
data = consumer.get("k", timeout=60)
"""


@pytest.mark.parametrize("url", ["inproc://f", "shm://f?directory={}", "zmq+tcp://127.0.0.1:0"])
def test_a_process_that_forgets_its_links_ends(url: str, sockets: str) -> None:
    """Its threads have already ended; nothing may wait for them."""
    command = [sys.executable, "-c", FORGOTTEN, url.format(sockets)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


WAITING = """
import asyncio, sys, threading, time
from omni_kvlink import ClosedError, KVLink, TransferTimeout
from omni_kvlink.aio import AsyncKVConsumer
url, mode = sys.argv[1:]
producer = KVLink.serve(url)
consumer = KVLink.connect(producer.url, timeout=60)
if mode == "lost":
    producer.close()
    while consumer.is_connected:
        time.sleep(0.01)

async def aget():
    await AsyncKVConsumer(consumer).get("k", timeout=3600)

def wait():
    began.set()
    try:
        if mode == "connect":
            KVLink.connect("inproc://nobody" if "inproc" in url else absent, timeout=3600)
        elif mode == "aio":
            asyncio.run(aget())
        else:
            consumer.get("k", timeout=3600)
    except ClosedError:
        print("closed", flush=True)

absent = url.replace("0", "9").replace("/w", "/absent")
began = threading.Event()
threading.Thread(target=wait).start()
began.wait()
if mode in ("get", "aio"):
    while not producer.stats()["transfers"]["waiting"]:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("mode", ["get", "aio", "connect", "lost"])
@pytest.mark.parametrize(
    "url", ["inproc://w", "shm://w?directory={}", "zmq+ipc://{}/w", "auto://w?directory={}"]
)
def test_a_process_ends_although_a_thread_waits(url: str, mode: str, sockets: str) -> None:
    """Once the main thread has ended, what its other threads wait for raises ClosedError."""
    command = [sys.executable, "-c", WAITING, url.format(sockets), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


@pytest.mark.parametrize("url", ["inproc://l", "shm://l", "zmq+ipc://{sockets}/l"])
def test_each_end_has_the_layouts_of_its_own_payloads(
    url: str, sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A payload like the one before is neither planned nor decoded again; on another link it is."""
    planned, decoded = list[str](), list[int]()
    lay_out, decode = Manifest.lay_out, decode_header

    def counted_plan(request_id: str, *arguments: Any, **options: Any) -> Manifest:
        planned.append(request_id)
        return lay_out(request_id, *arguments, **options)

    def counted_decode(text: bytes, total: int) -> Manifest:
        decoded.append(total)
        return decode(text, total)

    monkeypatch.setattr(Manifest, "lay_out", counted_plan)
    monkeypatch.setattr("omni_kvlink.payload.layout_cache.decode_header", counted_decode)
    for number in (1, 2):
        with (
            KVLink.serve(f"{url}{number}".format(sockets=sockets), directory=sockets) as producer,
            KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
        ):
            for name in "abc":
                receipt = producer.put(TensorTransferData(name, {"a": torch.ones(3)}))
                with consumer.get(name, timeout=60) as data:
                    assert torch.equal(dense(data.tensors()[0]), torch.ones(3))
                receipt.wait(timeout=60)
        assert (planned, len(decoded)) == (["a"] * number, number)


def test_a_bundle_of_tensors_by_name(ends: tuple[KVProducer, KVConsumer]) -> None:
    """Its layout is known from the second one on, and is no `TensorTransferData`."""
    producer, consumer = ends
    for name in "abc":
        data = TensorTransferData(name, {"x": torch.ones(3)})
        producer.put(KVCacheBundle(name, {"t": data}))
        with consumer.get(name, timeout=60) as received:
            assert isinstance(received, KVCacheBundle)
            assert received.tensor_data["t"].difference(data) == ""


def test_ledger_counts_one_copy(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    data = Recipe("k", tokens=50).make()
    receipt = producer.put(data)
    assert receipt.ledger.copies == 1
    assert receipt.ledger.digests == "crc32c"
    assert list(receipt.ledger.seconds) == ["plan", "reserve", "copy", "publish"]
    received = consumer.get("k", timeout=60)
    assert received.ledger.copies == 0
    assert received.ledger.nbytes == receipt.ledger.nbytes
    received.release()


@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 17])
def test_a_receipt_tells_when_its_payload_expires(
    ends: tuple[KVProducer, KVConsumer], nbytes: int
) -> None:
    producer, _ = ends
    called = time.monotonic()
    receipt = producer.put(TensorTransferData("k", {"a": torch.zeros(nbytes // 4)}), ttl=500.0)
    assert called + 500.0 <= receipt.expires <= time.monotonic() + 500.0
    with producer.open_stream("s", {"a": torch.zeros(1)}, ttl=500.0) as stream:
        stream.append({"a": torch.zeros(1)})
    assert stream.receipt is not None
    assert stream.receipt.expires > called + 500.0


def test_tensors_are_views_of_the_link(ends: tuple[KVProducer, KVConsumer]) -> None:
    """Nothing is copied on the way out: all tensors lie in one span, aligned."""
    producer, consumer = ends
    producer.put(Recipe("k", layers=4).make())
    received = consumer.get("k", timeout=60)
    assert isinstance(received.data, KVCacheTransferData)
    addresses = [dense(view).data_ptr() for view in received.data.tensors()]
    assert addresses == sorted(addresses)
    assert addresses[-1] - addresses[0] < received.manifest.nbytes
    assert all(address % 256 == 0 for address in addresses)
    received.release()


def test_put_copies_before_it_returns(ends: tuple[KVProducer, KVConsumer]) -> None:
    """The caller's tensors are its own again when put returns."""
    producer, consumer = ends
    data = Recipe("k").make()
    before = fingerprint(data)
    producer.put(data)
    for tensor in data.tensors():
        dense(tensor).zero_()
    with consumer.get("k", timeout=60) as found:
        assert fingerprint(found) == before
    del found


def test_bundle_branches_share_their_bytes(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    producer.put(Recipe("b", bundle=True, tokens=6).make())
    with consumer.get("b", timeout=60) as found:
        assert isinstance(found, KVCacheBundle)
        gen, text, img = (found[name].tensors() for name in ("gen", "cfg_text", "cfg_img"))
        assert [dense(t).data_ptr() for t in gen] == [dense(t).data_ptr() for t in text]
        assert [dense(t).data_ptr() for t in gen] == [dense(t).data_ptr() for t in img]
        assert found["empty"].is_empty
    del found, gen, text, img


def test_a_kept_branch_holds_the_payload(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    receipt = producer.put(Recipe("b", bundle=True).make())
    with consumer.get("b", timeout=60) as found:
        assert isinstance(found, KVCacheBundle)
        kept = dense(found["cfg_text"].tensors()[0])[:1]
    with pytest.raises(ClosedError):
        found["cfg_text"].tensors()
    expect(TransferTimeout, lambda: receipt.wait(timeout=0.05))
    del kept
    receipt.wait(timeout=60)


def test_a_numpy_view_holds_the_payload(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    receipt = producer.put(Recipe("k", dtype="float32").make())
    with consumer.get("k", timeout=60) as found:
        kept = dense(found.tensors()[0]).numpy()
    del found
    expect(TransferTimeout, lambda: receipt.wait(timeout=0.05))
    del kept
    receipt.wait(timeout=60)


def test_an_unreferenced_result_is_released(ends: tuple[KVProducer, KVConsumer]) -> None:
    """When it is garbage-collected: as read if its data was taken, else another get has it."""
    producer, consumer = ends
    receipt = producer.put(Recipe("k").make())
    consumer.get("k", timeout=60)
    until(lambda: receipt.state == "committed", "it was given back")
    assert consumer.get("k", timeout=60).data.request_id == "k"
    receipt.wait(timeout=60)


def test_release_twice_is_once(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    receipt = producer.put(Recipe("k").make(), readers=2)
    received = consumer.get("k", timeout=60)
    received.release()
    received.release()
    expect(TransferTimeout, lambda: receipt.wait(timeout=0.1), mentions=("1 readers missing",))
    with consumer.get("k", timeout=60):
        pass
    receipt.wait(timeout=60)


def test_error_in_the_block_gives_back(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    receipt = producer.put(Recipe("k").make())
    with pytest.raises(ZeroDivisionError), consumer.get("k", timeout=60):
        _ = 1 / 0
    until(lambda: receipt.state == "committed", "it was given back")
    with consumer.get("k", timeout=60):
        pass
    receipt.wait(timeout=60)


@pytest.mark.parametrize("bad", ["", "k" * 1025, "k" * 100_000, "\ud800", 5, None, b"k"])
def test_bad_request_ids_are_refused_here(ends: tuple[KVProducer, KVConsumer], bad: Any) -> None:
    """They are refused before they reach the peer, which would close the connection."""
    producer, consumer = ends
    for call in (
        lambda: consumer.get(bad, timeout=1),
        lambda: consumer.abort(bad),
        lambda: producer.fail(bad, "x"),
        lambda: producer.abort(bad),
    ):
        expect(SchemaError, call)
    receipt = producer.put(Recipe("k" * 1024).make())
    with consumer.get("k" * 1024, timeout=60):
        pass
    receipt.wait(timeout=60)


def test_long_reasons_are_cut(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    producer.fail("a", "x" * 100_000)
    error = expect(TransferFailed, lambda: consumer.get("a", timeout=60))
    assert 1000 < len(error.reason) < 5000
    receipt = producer.put(Recipe("b").make())
    consumer.abort("b", "y" * 100_000)
    expect(TransferFailed, lambda: receipt.wait(timeout=60))


def test_bad_verify_takes_nothing(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    receipt = producer.put(Recipe("k").make())
    with pytest.raises(ValueError, match="verify='maybe'"):
        consumer.get("k", timeout=1, verify="maybe")  # type: ignore[arg-type]
    assert receipt.state == "committed"
    with consumer.get("k", timeout=60, verify="off"):
        pass
    receipt.wait(timeout=60)


@pytest.mark.parametrize("timeout", [1e8, 1e12, float("inf")])
def test_endless_timeouts(ends: tuple[KVProducer, KVConsumer], timeout: float) -> None:
    producer, consumer = ends
    receipt = producer.put(Recipe("k").make(), timeout=timeout)
    with consumer.get("k", timeout=timeout):
        pass
    receipt.wait(timeout=timeout)


def test_zero_timeout_takes_what_is_there(ends: tuple[KVProducer, KVConsumer]) -> None:
    """It may time out, but never loses the payload."""
    producer, consumer = ends
    receipt = producer.put(Recipe("k").make())
    for _ in range(20):
        try:
            consumer.get("k", timeout=0).release()
            break
        except TransferTimeout:
            pass
    else:
        consumer.get("k", timeout=60).release()
    receipt.wait(timeout=60)


def test_digests_can_be_switched_off(sockets: str) -> None:
    with (
        KVLink.serve("shm://d", directory=sockets, digests=False) as producer,
        KVLink.connect("shm://d", timeout=60, directory=sockets) as consumer,
    ):
        receipt = producer.put(Recipe("k").make())
        assert receipt.ledger.digests == "off"
        received = consumer.get("k", timeout=60)
        assert received.ledger.digests == "off"
        assert fingerprint(received.data) == fingerprint(Recipe("k").make())
        received.release()


def test_link_is_collected_after_close(ends: tuple[KVProducer, KVConsumer]) -> None:
    """Nothing (a thread, a finalizer, a registry) keeps a closed link."""
    url = f"inproc://cycle-{next(_numbers)}"
    producer = KVLink.serve(url)
    consumer = KVLink.connect(url, timeout=1)
    producer.put(Recipe("k").make())
    with consumer.get("k", timeout=60):
        pass
    consumer.close()
    producer.close()
    dead = weakref.ref(end_of(producer)), weakref.ref(end_of(consumer))
    del producer, consumer
    gc.collect()
    assert [end() for end in dead] == [None, None]


def test_unclosed_link_of_a_child_is_silent(ends: tuple[KVProducer, KVConsumer]) -> None:
    """Only the process that opened a link is warned that it is unclosed."""
    producer, _ = ends
    child = os.fork()
    if child == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # What the interpreter runs when the link is collected: here in a child, and at once.
            producer._dropped.run()
        os._exit(len(caught))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("scheme", ["inproc", "shm"])
@pytest.mark.parametrize("given", ["keys", "peers"])
def test_keys_where_nothing_is_encrypted(sockets: str, scheme: str, given: str) -> None:
    """Encryption options on an unencrypted transport raise, rather than being ignored."""
    options: dict[str, Any] = {given: "somewhere", "directory": sockets}
    with pytest.raises(ValueError, match="not encrypted"):
        KVLink.serve(f"{scheme}://keys", **options)
    with pytest.raises(ValueError, match="not encrypted"):
        KVLink.connect(f"{scheme}://keys", timeout=60, **options)


def test_connecting_to_port_0_is_refused() -> None:
    with pytest.raises(ValueError, match="port 0"):
        KVLink.connect("zmq+tcp://127.0.0.1:0", timeout=60)


def test_copies_are_counted_on_each_side() -> None:
    """Over a network the bytes are copied once on arrival; scattering is a copy more."""
    data = Recipe("counted").make()
    targets = [torch.zeros_like(dense(view)) for view in data.tensors()]
    with (
        KVLink.serve("zmq+tcp://127.0.0.1:0") as producer,
        KVLink.connect(producer.url, timeout=60) as consumer,
    ):
        receipt = producer.put(data)
        received = consumer.get("counted", timeout=60)
        assert (receipt.ledger.copies, received.ledger.copies) == (1, 1)
        received.scatter(targets)
        assert received.ledger.copies == 2
        received.release()
        receipt.wait(timeout=60)


def test_the_time_of_a_reconnection_counts(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get of 60 s whose connection took 59.9 s waits for 0.1 s only."""
    _, consumer = ends
    late = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + late[0], perf_counter=time.perf_counter
    )
    monkeypatch.setattr(waits, "time", clock)
    begin = end_of(consumer).begin

    def begin_late(*arguments: Any, **options: Any) -> list[PendingGet]:
        late[0] = 59.9
        gets: list[PendingGet] = begin(*arguments, **options)
        return gets

    monkeypatch.setattr(end_of(consumer), "begin", begin_late)
    error = expect(TransferTimeout, lambda: consumer.get("k", timeout=60))
    assert error.waited < 59
