"""Falsified bytes of an encrypted link end no process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVLink
from omni_kvlink.connectors.control import monitored_socket as zmq_sockets
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.testing.caches import sized
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import until
from support.connectors.key_files import KeyFiles
from support.connectors.zmq_addresses import free_port
from support.network.proxy import FALSE, Proxy

if TYPE_CHECKING:
    from pathlib import Path

    from support.faults.harness import Start

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
HEARTBEATS = 2.5 * zmq_sockets.HEARTBEAT_MS / 1000


def test_falsified_and_then_cut_off(start: Start, tmp_path: Path) -> None:
    """The producer survives, and serves the next reader."""
    key_files, target, port = KeyFiles(tmp_path), start(), free_port()
    producer, proxy = RemoteLink(target, "p"), Proxy(port)
    producer.call(
        "serve", url=f"zmq+tcp://127.0.0.1:{port}", quota=8 << 20, **key_files.producer_options
    )
    url = f"zmq+tcp://127.0.0.1:{proxy.port}"
    try:
        for seed in range(12):
            with KVLink.connect(
                url, timeout=PATIENCE, quota=8 << 20, **key_files.consumer_options()
            ) as reader:
                proxy.start_harm(FALSE[seed % 4], str(seed), mean=1)
                pending = begin_get(reader, "never", timeout=PATIENCE)
                connection = proxy.connections[-1]
                until(lambda it=connection: it.falsified, "it was falsified")  # type: ignore[misc]
                time.sleep(0.02)  # the producer has received it now
                connection.end()
                proxy.stop_harm()
                pending.cancel()
        time.sleep(HEARTBEATS)
        assert target.process.poll() is None
        producer.call("put", recipe=sized("k", 1 << 20).to_dict())
        with KVLink.connect(
            url, timeout=PATIENCE, quota=8 << 20, **key_files.consumer_options()
        ) as reader:
            reader.get("k", timeout=PATIENCE, verify="full").release()
    finally:
        proxy.close()
