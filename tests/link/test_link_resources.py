"""What a link costs: memory, descriptors, page faults, idle time; and what it does without."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest
import torch

from omni_kvlink import (
    CapacityError,
    KVCacheTransferData,
    KVConsumer,
    KVLink,
    KVMetadata,
    KVProducer,
    TensorTransferData,
    TransferFailed,
)
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.rig import expect, until, until_freed
from support.faults.harness import until_loops_sleep
from support.link import footprint

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_memory_limit_is_a_capacity_error(sockets: str) -> None:
    """More memory than the machine has is refused, before the kernel's OOM killer would act."""
    memory = psutil.virtual_memory().total
    with KVLink.serve("shm://m", directory=sockets, quota=4 * memory) as producer:
        huge = torch.zeros(1, 1, dtype=torch.uint8).expand(2 * memory, 1).unsqueeze(1)
        data = KVCacheTransferData(
            "huge",
            {"key_cache": [huge], "value_cache": [huge]},
            metadata=KVMetadata((2 * memory,), (0,), 1),
        )
        error = expect(CapacityError, lambda: _put_without_digests(producer, data))
        assert error.requested > 2 * memory
        assert producer.stats()["memory"]["used"] == 0


def _put_without_digests(producer: KVProducer, data: KVCacheTransferData) -> None:
    producer._digests = False  # else the header of 32,000 GiB alone is too long
    producer.put(data, timeout=0)


def test_out_of_descriptors_is_a_capacity_error(sockets: str) -> None:
    with KVLink.serve("shm://fd", directory=sockets, mode="sealed", inline=0) as producer:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        top = max(int(number) for number in os.listdir("/proc/self/fd"))
        plugs = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, hard))
        try:
            while True:
                try:
                    plugs.append(os.dup(0))
                except OSError:  # noqa: PERF203 - it ends the loop
                    break
            data = Recipe("k").make()
            expect(CapacityError, lambda: producer.put(data, timeout=0))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for plug in plugs:
                os.close(plug)
        assert producer.stats()["memory"]["used"] == 0
        producer.put(data)


@pytest.mark.parametrize("scheme", ["shm", "auto"])
def test_a_closed_consumer_that_is_kept_has_no_descriptor(sockets: str, scheme: str) -> None:
    with KVLink.serve(f"{scheme}://c", directory=sockets) as producer:
        kept, before = list[KVConsumer](), set[str]()
        for key in ("a", "b"):  # with the first, the producer opens what it needs
            before = set(os.listdir("/proc/self/fd"))
            kept.append(KVLink.connect(f"{scheme}://c", directory=sockets, timeout=60))
            producer.put(Recipe(key).make())
            with kept[-1].get(key, timeout=60):
                pass
            kept[-1].close()
        until(
            lambda: set(os.listdir("/proc/self/fd")) <= before,
            "the descriptors of the connection are closed on both sides",
        )


def test_warm_transfers_meet_no_page_faults(sockets: str) -> None:
    """After the first round, 64 MB cross without faults in payload size on either side."""
    recipe = Recipe("k", layers=2, tokens=16_000, heads=8, dim=64, dtype="bfloat16")
    data = recipe.make()
    nbytes = data.plan().nbytes
    assert nbytes > 60e6
    options: dict[str, Any] = {"directory": sockets, "quota": 256 << 20}
    with (
        KVLink.serve("shm://warm", **options) as producer,
        KVLink.connect("shm://warm", timeout=60, **options) as consumer,
    ):
        for turn in range(4):
            before = resource.getrusage(resource.RUSAGE_SELF)
            receipt = producer.put(data)
            with consumer.get("k", timeout=60, verify="full"):
                pass
            receipt.wait(timeout=60)
            after = resource.getrusage(resource.RUSAGE_SELF)
            faults = after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt
            if turn:
                assert faults < nbytes / 4096 / 20, f"{faults} faults in turn {turn}"
        until_freed(producer)


@pytest.mark.parametrize("ends", ["inproc", "shm"], indirect=True)
def test_an_idle_link_sleeps(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two connected ends and a waiting get poll nothing."""
    producer, consumer = ends
    waiting = threading.Thread(
        target=lambda: expect(TransferFailed, lambda: consumer.get("k", timeout=60))
    )
    waiting.start()
    until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the want arrived")
    until_loops_sleep(monkeypatch)
    consumer.abort("k")
    waiting.join()


def test_hundreds_of_transfers_leave_nothing(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    data = Recipe("k").make()
    process = psutil.Process()

    def turn() -> None:
        receipt = producer.put(data)
        with consumer.get("k", timeout=60):
            pass
        receipt.wait(timeout=60)

    for _ in range(100):
        turn()
    until_freed(producer)
    descriptors, memory = process.num_fds(), process.memory_info().rss
    for _ in range(300):
        turn()
    until_freed(producer)
    until(lambda: process.num_fds() <= descriptors, "the descriptors are back")
    assert process.memory_info().rss - memory < 1 << 20


def test_the_collector_looks_at_no_live_payload(sockets: str) -> None:
    """Else one collection of tens of thousands would take as long as a thousand puts."""
    row = torch.ones(64)
    with KVLink.serve("shm://live", directory=sockets) as producer:
        receipts = [producer.put(TensorTransferData("warm", {"row": row}))]
        gc.collect()
        before = len(gc.get_objects())
        for number in range(300):
            receipts.append(producer.put(TensorTransferData(f"k{number}", {"row": row})))
            if number == 100:
                large = torch.ones(1 << 14)
                receipts.append(producer.put(TensorTransferData("large", {"row": large})))
        gc.collect()  # tuples of what is not looked at are left out from now on
        assert len(gc.get_objects()) - before < 100
        assert not any(receipt.done for receipt in receipts)


def test_nothing_of_a_payloads_size_beside_the_payload(sockets: str) -> None:
    """210 MB whole, streamed, in place, copied out: 32 MiB and few faults more, on both sides."""
    url = f"shm://footprint?directory={sockets}&quota={footprint.NBYTES + (32 << 20)}"
    sides = {
        side: subprocess.Popen(
            [sys.executable, footprint.__file__, side, url], stdout=subprocess.PIPE
        )
        for side in ("produce", "consume")
    }
    try:
        output = {side: process.communicate(timeout=600)[0] for side, process in sides.items()}
    finally:
        for process in sides.values():
            process.kill()
            process.communicate()
    found = {side: json.loads(line) for side, line in output.items()}
    for side, costs in found.items():
        assert len(costs) == 5
        for step, (nbytes, faults) in costs.items():
            assert nbytes <= 32 << 20, f"{side} {step}: {nbytes} bytes more"
            assert faults < footprint.NBYTES / 4096 / 20, f"{side} {step}: {faults} page faults"
