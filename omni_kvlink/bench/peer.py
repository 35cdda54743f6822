"""The reading end of a benchmark: `python -m omni_kvlink.bench.peer`, one JSON line each way.

The same conversation runs in a thread where both ends must be in one process (`inproc`).
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch

from omni_kvlink.bench.payloads import Shape, Sources, bytes_of, found_in, make_sample
from omni_kvlink.bench.raw_tcp import Receiver
from omni_kvlink.link import KVLink, Payload
from omni_kvlink.memory.region import PAGE
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.views import TensorView, dense

Message: TypeAlias = dict[str, Any]


class Raw(Protocol):
    """The receiving end of a yardstick."""

    def receive(self) -> int: ...

    def close(self) -> None: ...


def faults(*, own_thread: bool) -> int:
    """Minor page faults so far, of the process or of this thread alone."""
    who = resource.RUSAGE_THREAD if own_thread else resource.RUSAGE_SELF
    return resource.getrusage(who).ru_minflt


class Reader:
    """Does what the other end asks; each method is one command and returns its answer."""

    def __init__(self, *, own_thread: bool):
        self._own_thread = own_thread
        self._link: KVLink | None = None
        self._raws: dict[str, Raw] = {}
        self._made: list[list[TensorView]] = []

    def answer(self, command: Message) -> Message:
        """Do one command; an error becomes an answer."""
        received = time.monotonic_ns()
        arguments = dict(command)
        name = arguments.pop("do")
        if name == "ping":
            return {"received": received}
        try:
            method: Callable[..., Message] = getattr(self, f"do_{name}")
            return method(**arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def do_open(self, *, url: str, timeout: float, threads: int) -> Message:
        if not self._own_thread:
            torch.set_num_threads(threads)
        self._link = KVLink.connect(url, timeout=timeout)
        return {"opened": url}

    def do_get(
        self, *, key: str, timeout: float, verify: Literal["auto", "full", "off"]
    ) -> Message:
        """Wait for a payload, hold its views, touch every page of them, let go."""
        before = faults(own_thread=self._own_thread)
        received = self._opened().get(key, timeout=timeout, verify=verify)
        returned = time.monotonic_ns()
        with received as data:
            for cache in _caches(data).values():
                for tensor in cache.tensors():
                    bytes_of(dense(tensor))[::PAGE].sum()
            touched = faults(own_thread=self._own_thread) - before
            cache = tensor = data = None  # type: ignore[assignment]
        dropped = time.monotonic_ns()
        seconds = received.ledger.seconds
        return {
            "returned": returned,
            "dropped": dropped,
            "view": int(1e9 * seconds["view"]),
            "verify": int(1e9 * seconds.get("verify", 0.0)),
            "faults": touched,
        }

    def do_copy_out(self, *, key: str, timeout: float, at: int = 0, **where: Any) -> Message:
        """Wait for a payload and copy it into tensors that were used before, not before `at`."""
        targets = self._targets(**where)
        received = self._opened().get(key, timeout=timeout)
        while time.monotonic_ns() < at:
            pass
        received.scatter([part for layer in targets for part in layer])
        last = time.monotonic_ns()
        received.release()
        return {"last": last}

    def do_copy_layers_out(self, *, key: str, timeout: float, **where: Any) -> Message:
        """The same, layer by layer as they come."""
        targets, first, last = self._targets(**where), 0, 0
        with self._opened().stream_get(key, timeout=timeout) as stream:
            for layer in stream:
                layer.scatter(*targets[layer.index])
                last = time.monotonic_ns()
                first = first or last
        return {"first": first, "last": last}

    def do_inspect(self, *, key: str, timeout: float) -> Message:
        """Wait for a payload and tell what is in it."""
        with self._opened().get(key, timeout=timeout) as data:
            return {"branches": {name: found_in(cache) for name, cache in _caches(data).items()}}

    def do_idle(self, *, key: str, seconds: float) -> Message:
        """Wait in vain for a payload, and tell what the waiting cost."""
        want = self._opened().begin_get(key, timeout=1.0)
        before = time.process_time()
        time.sleep(seconds)
        used = time.process_time() - before
        want.cancel()
        return {"cpu": used}

    def do_raw_open(self, *, name: str, port: int, nbytes: int) -> Message:
        """Prepare to take so many bytes from a raw TCP connection, again and again."""
        self._raws[name] = Receiver(port, nbytes)
        return {"opened": port}

    def do_raw_ucx_open(self, *, name: str, address: str, nbytes: int, plain: bool) -> Message:
        """The same by ucxx."""
        from omni_kvlink.bench.raw_ucx import Receiver as UcxReceiver

        self._raws[name] = receiver = UcxReceiver(address, nbytes, plain=plain)
        return {"address": receiver.address}

    def do_raw_zmq_open(self, *, name: str, port: int) -> Message:
        """Prepare to send back what comes over ZMQ."""
        from omni_kvlink.bench.raw_zmq import Receiver as ZmqReceiver

        self._raws[name] = ZmqReceiver(port)
        return {"opened": port}

    def do_raw_receive(self, *, name: str) -> Message:
        return {"received": self._raws[name].receive()}

    def do_close(self) -> Message:
        for raw in self._raws.values():
            raw.close()
        self._raws.clear()
        if self._link is not None:
            self._link.close()
        return {"closed": True}

    def _targets(self, *, shape: dict[str, Any], paged: bool) -> list[list[TensorView]]:
        """K and V of each layer, or the pages for them; made once, every page touched."""
        if not self._made:
            rng = np.random.default_rng(1)
            sources: Sources = "paged" if paged else "contiguous"
            cache = make_sample("targets", Shape(**shape), rng, sources=sources).cache
            # A tensor of torch's begins on a cache line, as an engine's do; numpy's do not.
            places = [p if paged else torch.zeros_like(dense(p)) for p in cache.tensors()]
            parts = len(cache.layer_blocks)
            self._made = [places[at : at + parts] for at in range(0, len(places), parts)]
        return self._made

    def _opened(self) -> KVLink:
        if self._link is None:
            raise RuntimeError("not connected")
        return self._link


def converse(lines: Iterable[str], reply: Callable[[str], None], *, own_thread: bool) -> None:
    """Answer line by line until they end."""
    reader = Reader(own_thread=own_thread)
    try:
        for line in lines:
            reply(json.dumps(reader.answer(json.loads(line))))
    finally:
        reader.do_close()


def _caches(data: Payload) -> dict[str, KVCacheTransferData]:
    if isinstance(data, KVCacheBundle):
        return {name: data[name] for name in data}
    return {"": data}


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    converse(sys.stdin, _print, own_thread=False)
