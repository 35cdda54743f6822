"""A process of `fault_comparison.py` that transfers with vLLM-Omni's connector, or with bare ZMQ.

Each system is used as its own documentation shows: what it does not report is not reported here.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import zmq

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.network.features import number_of, recipe
from support.network.peer_process import Incarnation, Log, main, wait_for_term

if TYPE_CHECKING:
    from collections.abc import Iterator

POLL = 0.001
"""Seconds between two looks for a payload, where a system must be polled."""
Arrays = list[Any]
"""The tensors of a payload as numpy arrays of bytes."""


class System(Protocol):
    """One side of a transfer; names are unique on this machine."""

    def put(self, key: str, number: int, arrays: Arrays) -> bool:
        """Send a payload of incarnation `number`; False if the system says that it did not."""

    def get(self, key: str, timeout: float) -> tuple[int, Arrays] | None:
        """Receive a payload, or None after `timeout` seconds."""

    def close(self) -> None:
        """End this side as the system's own code does."""


class OmniSharedMemory:
    """vLLM-Omni's `SharedMemoryConnector`, polled by its readers as its manager does."""

    def __init__(self, incarnation: Incarnation):
        from vllm_omni.distributed.omni_connectors.connectors.shm_connector import (
            SharedMemoryConnector,
        )

        self._connector = SharedMemoryConnector({"stage_id": incarnation.role})
        self._prefix = incarnation.options["prefix"]

    def put(self, key: str, number: int, arrays: Arrays) -> bool:
        message = {"number": number, "arrays": arrays}
        done, _, _ = self._connector.put("0", "1", self._prefix + key, message)
        return bool(done)

    def get(self, key: str, timeout: float) -> tuple[int, Arrays] | None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = self._connector.get("0", "1", self._prefix + key)
            if found is not None:
                return found[0]["number"], found[0]["arrays"]
            time.sleep(POLL)
        return None

    def close(self) -> None:
        self._connector.close()


class BareZmq:
    """A PUSH socket of the producer for each reader, which has a PULL socket."""

    def __init__(self, incarnation: Incarnation):
        self._context = zmq.Context()
        self._url, self._arrived = incarnation.url, dict[str, tuple[int, Arrays]]()
        self._pull = self._context.socket(zmq.PULL)
        self._push = list[zmq.Socket[bytes]]()
        for remainder in range(2) if incarnation.role == "producer" else ():
            self._push.append(self._context.socket(zmq.PUSH))
            self._push[-1].bind(f"{self._url}.{remainder}")
        if incarnation.role == "reader" and incarnation.tasks:
            self._pull.connect(f"{self._url}.{_remainder(incarnation.tasks[0][0])}")

    def put(self, key: str, number: int, arrays: Arrays) -> bool:
        self._push[_remainder(key)].send_multipart([key.encode(), b"%d" % number, *arrays])
        return True

    def get(self, key: str, timeout: float) -> tuple[int, Arrays] | None:
        deadline = time.monotonic() + timeout
        while key not in self._arrived:
            left = deadline - time.monotonic()
            if left <= 0 or not self._pull.poll(int(left * 1e3)):
                return None
            name, number, *frames = self._pull.recv_multipart()
            arrays = [np.frombuffer(frame, np.uint8) for frame in frames]
            self._arrived[name.decode()] = int(number), arrays
        return self._arrived.pop(key)

    def close(self) -> None:
        self._context.destroy()


SYSTEMS: dict[str, type[OmniSharedMemory] | type[BareZmq]] = {
    "vllm-omni shm": OmniSharedMemory,
    "bare zmq": BareZmq,
}


def payload(key: str, number: int) -> Arrays:
    """The bytes that an incarnation of the producer puts under a key."""
    tensors = recipe(key, number).make().tensors()
    return [np.ascontiguousarray(tensor.numpy()).reshape(-1) for tensor in tensors]  # type: ignore[union-attr]


def sha256(arrays: Arrays) -> str:
    """The digest of a payload's bytes."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(memoryview(array))
    return found.hexdigest()


def produce(system: System, incarnation: Incarnation, log: Log) -> None:
    """Put every payload; nobody is told whether it arrives."""
    for key, readers in incarnation.tasks:
        log.write(key, "put", int(readers))
        if not system.put(key, incarnation.number, payload(key, incarnation.number)):
            log.write(key, "refused")


def read(system: System, incarnation: Incarnation, log: Log) -> None:
    """Get every payload, and compare it with what the producer's incarnation has put."""
    for key, patience in incarnation.tasks:
        found = system.get(key, patience)
        if found is None:
            log.write(key, "TransferTimeout")
            continue
        number, arrays = found
        is_right = sha256(arrays) == sha256(payload(key, number))
        log.write(key, "read" if is_right else "WRONG", number)


@contextlib.contextmanager
def opened(incarnation: Incarnation) -> Iterator[System]:
    """One side of the system that the options name."""
    system = SYSTEMS[incarnation.options["system"]](incarnation)
    try:
        yield system
    finally:
        system.close()


def run(incarnation: Incarnation) -> None:
    """Do what an incarnation is for, until SIGTERM."""
    log = Log(incarnation.log)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    try:
        with opened(incarnation) as system:
            (produce if incarnation.role == "producer" else read)(system, incarnation, log)
            # Python's tracker of shared memory unblocks it.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            wait_for_term(log)
    except BaseException:
        log.write("-", "BROKE")
        raise


def _remainder(key: str) -> int:
    return number_of(key) % 2


if __name__ == "__main__":
    # Before the first fork; vLLM's log goes to what is standard output then.
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(ImportError):
        import vllm_omni.distributed.omni_connectors.connectors.shm_connector  # noqa: F401
    main(run)
