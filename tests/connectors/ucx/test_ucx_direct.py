"""Direct puts over UCX; host memory stands in for GPU memory."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from omni_kvlink import KVLink, SchemaError
from omni_kvlink._native import cuda_context
from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.connectors.ucx.transport import UcxTransport
from omni_kvlink.connectors.ucx.worker import UcxWorker
from omni_kvlink.link import direct_put as direct
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import fingerprint, sized

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
BIG = sized("k", 3 << 20)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Every tensor claims to be on a GPU; UCX determines the memory type itself.

    The list has the devices whose context a thread took, and the thread's name.
    """
    taken = list[tuple[int, str]]()

    def use_device(number: int) -> None:
        taken.append((number, threading.current_thread().name))

    monkeypatch.setattr(direct, "device_of", lambda view: "cuda:1")
    monkeypatch.setattr(cuda_context, "use_device", use_device)
    return taken


def test_device_tensors_are_sent_without_a_copy(
    on_a_gpu: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = set[tuple[str, int]]()
    send = UcxTransport.send

    def sent(self: Any, endpoint: Any, memory: Any, tag: int, done: Any) -> Any:
        taken.add((memory.device, memory.address))
        return send(self, endpoint, memory, tag, done)

    monkeypatch.setattr(UcxTransport, "send", sent)
    data = BIG.make()
    addresses = {dense(view).data_ptr() for view in data.tensors()}
    with (
        KVLink.serve("ucx://127.0.0.1:0?trusted_network=1&ucx_tls=tcp,cuda_copy") as producer,
        KVLink.connect(producer.url, timeout=60) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        putting = pool.submit(producer.put, data, direct=True, digests=False)
        with reader.get("k", timeout=60) as found:
            assert fingerprint(found) == fingerprint(data)
        del found
        receipt = putting.result(60)
        receipt.wait(timeout=60)
    assert receipt.ledger.copies == 0
    assert {address for device, address in taken if device == "cuda:1"} == addresses
    assert on_a_gpu == [(1, "kvlink-ucx")]  # once, before the first of them was sent


def test_ucx_starts_in_its_creators_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transports for GPUs look for devices when they are opened, in the thread that does it."""
    used = list[tuple[int, str]]()
    monkeypatch.setattr(cuda_context, "current", lambda: 4096)
    monkeypatch.setattr(
        cuda_context, "use", lambda context: used.append((context, threading.current_thread().name))
    )
    for transports in ("tcp", "tcp,cuda_copy"):
        UcxTransport(UcxSettings(transports=transports)).close()
    assert used == [(0, "kvlink-ucx"), (4096, "kvlink-ucx")]


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("url", "how", "fields"),
    [
        ("ucx://127.0.0.1:0?trusted_network=1", {"digests": False}, "ucx_tls='tcp,cuda_copy'"),
        ("ucx://127.0.0.1:0?trusted_network=1&ucx_tls=tcp,cuda_copy", {}, "digests=False"),
        ("zmq+tcp://127.0.0.1:0", {"digests": False}, "host memory"),
    ],
)
def test_the_error_names_what_device_tensors_need(
    url: str, how: dict[str, bool], fields: str
) -> None:
    with KVLink.serve(url) as producer:
        with pytest.raises(SchemaError, match=fields):
            producer.put(BIG.make(), direct=True, **how)
        assert producer.stats()["transfers"]["live"] == 0


def test_device_memory_is_passed_to_ucx_as_such() -> None:
    memory = Mapping.anonymous(1 << 20).region
    there = Region(memory.address, memory.nbytes, memory.owner, device="cuda:0")
    worker = UcxWorker(UcxSettings())
    for region, is_there in ((memory, False), (there, True)):
        array = worker.array(region)
        assert (array.cuda, array.ptr, array.nbytes) == (is_there, memory.address, 1 << 20)
