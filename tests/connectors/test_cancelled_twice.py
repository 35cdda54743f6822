"""To cancel a get that was cancelled, or whose `wait` has ended, does nothing."""

from __future__ import annotations

import pytest

from omni_kvlink import KVLink, TransferTimeout
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


@pytest.mark.parametrize("url", ["inproc://twice", "shm://twice", "zmq+ipc://{root}/t"])
def test_cancelled_twice(url: str, sockets: str) -> None:
    data = Recipe("k").make()
    with (
        KVLink.serve(url.format(root=sockets), directory=sockets) as producer,
        KVLink.connect(producer.url, directory=sockets, timeout=60) as consumer,
    ):
        pending = begin_get(consumer, "k", timeout=60)
        with pytest.raises(TransferTimeout):
            pending.wait(timeout=0.0)
        pending.cancel()
        pending = begin_get(consumer, "k", timeout=60)
        pending.cancel()
        pending.cancel()
        until(lambda: not producer.stats()["transfers"]["waiting"], "no get waits")
        receipt = producer.put(data)
        pending = begin_get(consumer, "k", timeout=60)
        delivery = pending.wait(timeout=60)
        pending.cancel()
        assert producer.stats()["transfers"]["leased"] == 1, "the delivery has the lease"
        del delivery
        with consumer.get("k", timeout=60) as found:
            assert fingerprint(found) == fingerprint(data)
        del found
        receipt.wait(timeout=60)
