"""More messages of one peer than the producer reads: libzmq must not stop reading from it."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import threading, time
from omni_kvlink import KVLink
from omni_kvlink.connectors.protocol.messages import Get
from support.connectors.zmq_unauthorized import greeted_peer

busy, go_on = threading.Event(), threading.Event()
def block():
    busy.set()
    go_on.wait()

with KVLink.serve("zmq+tcp://127.0.0.1:0") as producer:
    with greeted_peer(producer.url, SNDHWM=0) as peer:
        producer._end.loop.call(block)
        busy.wait()
        for number in range(20_000):
            peer.send(Get(number + 1, "k" * 1000))
        time.sleep(1)  # ZMQ's thread receives what the loop does not read
    time.sleep(2)  # it sends a heartbeat, and learns that the peer has gone
    go_on.set()
    while producer.stats()["readers"]:
        time.sleep(0.01)
    print("alive", flush=True)
"""


def test_a_peer_that_leaves_while_the_producer_is_busy() -> None:
    """The process goes on: libzmq 4.3.5 ends it if it had stopped reading from this peer."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout == "alive\n", done.stderr
