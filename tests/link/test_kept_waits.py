"""A put that waits for memory, and kept payloads that become idle in each way."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVLink
from omni_kvlink.testing.caches import fingerprint, sized
from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from omni_kvlink import Payload

QUOTA = 1 << 20
OTHER = sized("other", 700_000, seed=3).make()


def kept() -> Payload:
    return sized("kept", 700_000).make()


@pytest.mark.parametrize("how", ["released", "dropped", "disconnected"])
def test_a_put_is_woken_when_a_kept_payload_becomes_idle(sockets: str, how: str) -> None:
    """The reader releases it, drops the last view, or closes its link."""
    options: dict[str, Any] = {"directory": sockets, "quota": QUOTA, "prefault": 0}
    with (
        KVLink.serve("shm://woken", **options) as producer,
        KVLink.connect("shm://woken", timeout=60, directory=sockets) as consumer,
        KVLink.connect("shm://woken", timeout=60, directory=sockets) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        receipt = producer.put(kept(), readers=None)
        received = consumer.get("kept", timeout=60, wait=False)
        assert fingerprint(received.data) == fingerprint(kept())
        put = pool.submit(producer.put, OTHER, timeout=600)
        until(lambda: producer.stats()["memory"]["waiting"] == 1, "the put waits")
        assert not receipt.done
        if how == "disconnected":
            consumer.close()
        if how == "released":
            received.release()
        del received
        gc.collect()
        put.result(60)
        assert receipt.state == "evicted"
        with other.get("other", timeout=60) as data:
            assert fingerprint(data) == fingerprint(OTHER)
        del data
