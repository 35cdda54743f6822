"""The reading end of a benchmark: `python -m omni_kvlink.bench.reader`.

The same commands run in a thread where both ends must be in one process (`inproc`). They run one
after another, so that no other thread disturbs what is timed. Moments are monotonic nanoseconds.
"""

from __future__ import annotations

import gc
import resource
import time
from typing import Any, Literal

import numpy as np
import torch

from omni_kvlink.bench.baselines import TIMEOUT, BufferTransfer, make_end
from omni_kvlink.bench.chunks import ChunkBytes, ChunkRecorder, Pipe, TimedRecorder
from omni_kvlink.bench.pace import RECEIVE, ChunkReader, sent_positions
from omni_kvlink.bench.payloads import Sources, bytes_of, found_in, make_sample
from omni_kvlink.bench.pipelined import get_batches, get_singly
from omni_kvlink.bench.remote import boot
from omni_kvlink.bench.setups import Paced, Shape
from omni_kvlink.errors import IntegrityError
from omni_kvlink.link import ChunkStream, KVLink, ReceivedChunk, begin_get
from omni_kvlink.memory.mapping import PAGE
from omni_kvlink.payload.views import TensorView, dense
from omni_kvlink.testing.caches import parts_of
from omni_kvlink.testing.peer_harness import CommandSet, serve


def page_faults(*, own_thread: bool) -> int:
    """Minor page faults so far, of the process or of this thread alone."""
    scope = resource.RUSAGE_THREAD if own_thread else resource.RUSAGE_SELF
    return resource.getrusage(scope).ru_minflt


def freeze_gc() -> None:
    """Have the garbage collector look no more at what there is now, as an engine does at start."""
    gc.collect()
    gc.freeze()


class ReaderCommands(CommandSet):
    """The commands of a benchmark's reader, which may be a thread of the producer's process."""

    def __init__(self, *, own_thread: bool):
        super().__init__()
        self._own_thread = own_thread
        self._clock = 0
        self._link: Any = None
        self._baselines: dict[str, BufferTransfer] = {}
        self._target_layers: list[list[TensorView]] = []
        self._streams: list[ChunkStream[ReceivedChunk]] = []
        self._pipe: Pipe | None = None

    def connect(self, url: str, timeout: float, threads: int, options: dict[str, Any]) -> None:
        """Connect to the producer; `threads` are torch's in this process."""
        if not self._own_thread:
            torch.set_num_threads(threads)
        self._link = KVLink.connect(url, timeout=timeout, **options)

    def boot(self) -> str:
        """See `remote.boot`."""
        return boot()

    def set_clock(self, offset: int) -> None:
        """Add nanoseconds to every moment: the producer's clock is another host's."""
        self._clock = offset

    def ping(self) -> int:
        """The moment at which the reader runs this command."""
        return self._now()

    def _now(self) -> int:
        return time.monotonic_ns() + self._clock

    def stats(self) -> dict[str, Any]:
        """The link's state and counters."""
        return dict(self._link.stats())

    def get(
        self, key: str, timeout: float, verify: Literal["auto", "full", "off"]
    ) -> dict[str, int]:
        """Wait for a payload, touch every page of its views, and release it.

        The result has the moments, nanoseconds of the steps of `get`, the page faults of all, and
        the CPU nanoseconds of the process.
        """
        faults_before, used = page_faults(own_thread=self._own_thread), -time.process_time_ns()
        received = self._link.get(key, timeout=timeout, verify=verify)
        returned = self._now()
        with received as data:
            for part in parts_of(data).values():
                for tensor in part.tensors():
                    bytes_of(dense(tensor))[::PAGE].sum()
            faults = page_faults(own_thread=self._own_thread) - faults_before
            part = tensor = data = None  # type: ignore[assignment]
        dropped = self._now()
        seconds = received.ledger.seconds
        return {
            "returned": returned,
            "dropped": dropped,
            "view": int(1e9 * seconds["view"]),
            "verify": int(1e9 * seconds.get("verify", 0.0)),
            "faults": faults,
            "cpu": used + time.process_time_ns(),
        }

    def copy_out(self, key: str, timeout: float, moment: int = 0, **targets: Any) -> int:
        """Wait for a payload, and copy it out after `moment`; when it was copied."""
        layers = self._targets(**targets)
        received = self._link.get(key, timeout=timeout)
        while self._now() < moment:
            pass
        received.scatter([part for layer in layers for part in layer])
        last = self._now()
        received.release()
        return last

    def copy_into(self, key: str, timeout: float, **targets: Any) -> int:
        """Get a payload into the targets; when it was copied."""
        into = [part for layer in self._targets(**targets) for part in layer]
        received = self._link.get(key, timeout=timeout, into=into)
        last = self._now()
        received.release()
        return last

    def copy_layers_out(self, key: str, timeout: float, **targets: Any) -> dict[str, int]:
        """Copy every layer of a stream out as soon as it comes; when the first and last were."""
        layers, first, last = self._targets(**targets), 0, 0
        with self._link.stream_get(key, timeout=timeout) as stream:
            for layer in stream:
                layer.scatter(*layers[layer.index])
                last = self._now()
                first = first or last
        return {"first": first, "last": last}

    def inspect(self, key: str, timeout: float) -> dict[str, Any]:
        """Wait for a payload; what is in it, by branch, see `found_in`."""
        with self._link.get(key, timeout=timeout) as data:
            return {name: found_in(part) for name, part in parts_of(data).items()}

    def idle(self, key: str, seconds: float) -> float:
        """Wait for a payload that does not come; the CPU seconds of this process meanwhile."""
        pending = begin_get(self._link, key, timeout=1.0)
        cpu_before = time.process_time()
        time.sleep(seconds)
        used = time.process_time() - cpu_before
        pending.cancel()
        return used

    def open_streams(self, names: list[str], timeout: float) -> None:
        """Open append streams, in this order."""
        self._streams = [self._link.read_stream(name, timeout=timeout) for name in names]

    def receive_streams(self, *, reader: str, **paced: int) -> dict[str, Any]:
        """Receive every chunk of the open streams, and their ends; see `TimedRecorder.result`."""
        content = ChunkBytes(Paced(**paced))
        into = TimedRecorder(content.raw_all())
        RECEIVE[reader](ChunkReader(self._streams, content.paced, into))
        for number, stream in enumerate(self._streams):
            if stream.receive(timeout=TIMEOUT) is not None:
                raise IntegrityError(f"stream {number} has too many chunks")
        self._streams.clear()
        return into.result()

    def open_pipe(self, path: str) -> None:
        """Open the reading end of a pipe."""
        self._pipe = Pipe(path, is_sender=False)

    def receive_pipe(self, **paced: int) -> dict[str, Any]:
        """Receive every chunk from the pipe; see `TimedRecorder.result`."""
        assert self._pipe is not None
        content = ChunkBytes(Paced(**paced))
        into = TimedRecorder(content.raw_all())
        self._pipe.receive(content.paced.nbytes, sent_positions(content.paced), into)
        return into.result()

    def open_runs(self, **paced: int) -> None:
        """Make what the payloads of `receive_run` are compared with."""
        self._content = ChunkBytes(Paced(**paced))

    def freeze_gc(self) -> None:
        """See the function `freeze_gc`."""
        freeze_gc()

    def receive_run(
        self, kind: str, run: int, count: int, outstanding: int, batch: int
    ) -> dict[str, Any]:
        """Receive the `count` payloads of a run; see `ChunkRecorder.result`."""
        into = ChunkRecorder(self._content.raw_run(run, count))
        into.begin()
        if kind == "pipe":
            assert self._pipe is not None
            self._pipe.receive(self._content.paced.nbytes, range(count), into, replies=True)
        elif kind == "batched":
            get_batches(self._link, run, batch, into)
        else:
            get_singly(self._link, run, outstanding, into)
        into.end()
        return into.result()

    def open_baseline(self, name: str, address: str, nbytes: int) -> str:
        """Connect the receiving end of a baseline; its address."""
        self._baselines[name] = receiver = make_end(name, nbytes, is_sender=False)
        receiver.connect(address)
        return receiver.address

    def receive_baseline(self, name: str) -> int:
        """Receive once over a baseline; the moment of the last byte."""
        baseline = self._baselines[name]
        baseline.receive()
        baseline.wait()
        arrived = self._now()
        baseline.check()
        return arrived

    def close(self) -> None:
        """Close the link, the pipes and the baselines."""
        for end in (*self._baselines.values(), self._pipe, self._link):
            if end is not None:
                end.close()
        self._baselines, self._pipe = {}, None

    close_all = close

    def _targets(self, *, shape: dict[str, Any], paged: bool) -> list[list[TensorView]]:
        """Tensors of each layer to copy into; made once, every page touched."""
        if not self._target_layers:
            rng = np.random.default_rng(1)
            sources: Sources = "paged" if paged else "contiguous"
            cache = make_sample("targets", Shape(**shape), rng, sources=sources).cache
            # A tensor of torch's begins on a cache line, as an engine's do; numpy's do not.
            views = [v if paged else torch.zeros_like(dense(v)) for v in cache.tensors()]
            parts = len(cache.layer_blocks)
            self._target_layers = [
                views[start : start + parts] for start in range(0, len(views), parts)
            ]
        return self._target_layers


def main() -> None:
    """Serve commands until standard input ends, then close the link."""
    commands = ReaderCommands(own_thread=False)
    try:
        serve(commands, concurrent=False)
    finally:
        commands.close_all()


if __name__ == "__main__":
    main()
