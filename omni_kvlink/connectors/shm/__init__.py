"""`shm://name`: payloads in sealed memory files, passed over a Unix socket; Linux, one host."""

import sys

from ..base import Backend, Options
from .consumer import ShmConsumer
from .producer import ShmProducer


def _connect(name: str, options: Options, timeout: float) -> ShmConsumer:
    consumer = ShmConsumer(name, options)
    consumer.connect(timeout)
    return consumer


def _unavailable() -> str | None:
    if sys.platform != "linux":
        return "it needs Linux (memfd, SEQPACKET sockets); use inproc:// within one process"
    return None


BACKEND = Backend(serve=ShmProducer, connect=_connect, unavailable=_unavailable)
