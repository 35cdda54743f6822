"""`shm://name`: payloads in sealed memory files, passed over a Unix socket; Linux, one host."""

import sys
from functools import partial

from omni_kvlink.connectors.base import Backend, Consumer, Options, refuse_keys
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.connectors.shm.consumer import ShmConsumer
from omni_kvlink.connectors.shm.listener import ShmListener
from omni_kvlink.memory.mapping import Mapping


def _serve(name: str, options: Options) -> PooledProducer:
    refuse_keys(f"shm://{name}", options)
    make = partial(Mapping.shared, f"kvlink-{name}")
    opener = partial(ShmListener, name, options)
    return PooledProducer(name, options, make, opener, is_shared=True)


def _connect(name: str, options: Options, timeout: float) -> Consumer:
    return ShmConsumer(name, options).connect(timeout)


def _unavailable() -> str | None:
    if sys.platform != "linux":
        return "it needs Linux (memfd, SEQPACKET sockets); use inproc:// within one process"
    return None


BACKEND = Backend(serve=_serve, connect=_connect, unavailable=_unavailable)
