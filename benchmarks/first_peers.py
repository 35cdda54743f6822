"""Seconds of the first transfer between two processes by NIXL, or by process_vm_readv.

    PYTHON benchmarks/first_peers.py (nixl | process_vm_readv) TENSORS BYTES

PYTHON has NIXL (`pip install nixl numpy`) for the first; this library is not needed. The reader
reads TENSORS buffers of BYTES each out of the producer's memory. All buffers are there and were
written before, as an engine's pools are, and are registered. The time begins when the reader has
the addresses: NIXL's has the connection in it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TIMEOUT = 60.0
_BUFFERS_A_CALL = 16


def _agent(name: str, buffers: list[Any]) -> Any:
    """A NIXL agent over UCX that has registered the buffers."""
    nixl = importlib.import_module("nixl._api")
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
    agent.register_memory(agent.get_reg_descs([(*one, "") for one in _extents(buffers)], "DRAM"))
    return agent


def _extents(buffers: list[Any]) -> list[tuple[int, int, int]]:
    return [(one.ctypes.data, one.nbytes, 0) for one in buffers]


def _produce(method: str, pipe: Connection, count: int, nbytes: int) -> None:
    """Keep the buffers until the reader has read them."""
    buffers = [np.full(nbytes, number % 251, np.uint8) for number in range(count)]
    agent = _agent("producer", buffers) if method == "nixl" else None
    metadata = agent.get_agent_metadata() if agent else b""
    # Where Yama is, a process says who may read its memory.
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)
    pipe.send((os.getpid(), metadata, _extents(buffers)))
    pipe.recv()


def _nixl(buffers: list[Any], metadata: bytes, extents: list[tuple[int, int, int]]) -> float:
    agent = _agent("reader", buffers)
    began = time.perf_counter()
    name = agent.add_remote_agent(metadata)
    into, source = (agent.get_xfer_descs(one, "DRAM") for one in (_extents(buffers), extents))
    transfer = agent.initialize_xfer("READ", into, source, name, b"first")
    state = agent.transfer(transfer)
    while state != "DONE":
        if state == "ERR":
            raise RuntimeError("NIXL's transfer failed")
        state = agent.check_xfer_state(transfer)
    return time.perf_counter() - began


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _vm_read(buffers: list[Any], pid: int, extents: list[tuple[int, int, int]]) -> float:
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    vector = (ctypes.c_void_p, ctypes.c_ulong)
    read.restype, read.argtypes = ctypes.c_ssize_t, (ctypes.c_int, *vector, *vector, ctypes.c_ulong)
    began = time.perf_counter()
    for first in range(0, len(buffers), _BUFFERS_A_CALL):
        sides = [
            [_Span(address, nbytes) for address, nbytes, _ in side[first : first + _BUFFERS_A_CALL]]
            for side in (_extents(buffers), extents)
        ]
        into, source = ((_Span * len(side))(*side) for side in sides)
        got = read(pid, into, len(into), source, len(source), 0)
        if got != sum(span.nbytes for span in source):
            raise OSError(ctypes.get_errno(), "process_vm_readv")
    return time.perf_counter() - began


def measure(method: str, count: int, nbytes: int) -> float:
    """Return the seconds of the first transfer; RuntimeError if a byte is wrong."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    producer = spawning.Process(target=_produce, args=(method, there, count, nbytes), daemon=True)
    producer.start()
    there.close()  # so that the end of a producer that fails is seen
    buffers = [np.full(nbytes, 255, np.uint8) for _ in range(count)]
    if not here.poll(TIMEOUT):
        raise RuntimeError("the producer did not begin")
    pid, metadata, extents = here.recv()
    if method == "nixl":
        seconds = _nixl(buffers, metadata, extents)
    else:
        seconds = _vm_read(buffers, pid, extents)
    if not all((one == number % 251).all() for number, one in enumerate(buffers)):
        raise RuntimeError("a byte is wrong")
    here.send(None)
    producer.join(TIMEOUT)
    return seconds


if __name__ == "__main__":
    method, count, nbytes = sys.argv[1:]
    print(json.dumps(measure(method, int(count), int(nbytes))), flush=True)
    os._exit(0)  # NIXL's threads hold up an exit
