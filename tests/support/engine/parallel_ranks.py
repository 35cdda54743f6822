"""Ranks of a stage, each in a process of its own, that run functions for a test."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine import OmniARConfig, OmniDiffusionConfig, OmniDiffusionRequest
from omni_kvlink.engine.config import DiffusionParallelConfig, KVConfig, StageConfig
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.kv.kv_state import KVState
from omni_kvlink.engine.step_cache.cache_backend import make_cache_backend
from omni_kvlink.engine.worker import GPUARWorker, GPUDiffusionWorker
from support.engine.fixtures import SHAPE, WAIT, bundle, checkpoint, request
from support.link.ends import end_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from omni_kvlink import KVCacheBundle

_numbers = itertools.count()
EDIT = [torch.arange(64 * 48 * 3).reshape(64, 48, 3).to(torch.uint8), "make it night"]


class RankProcesses:
    """The processes of all ranks of a stage."""

    def __init__(self, config: StageConfig):
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(config.parallel_config.world_size):
            here, there = context.Pipe()
            self._ends.append(here)
            self.processes.append(context.Process(target=_run_rank, args=(rank, config, there)))
        for process in self.processes:
            process.start()

    def wait_ready(self) -> RankProcesses:
        """Wait until all ranks have loaded their models."""
        self._answers(range(len(self._ends)))
        return self

    def call_all(self, call: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function with each rank's worker; the results. Raises what one of them raised."""
        return [value(answer) for answer in self.call_each([(call, *args)] * len(self._ends))]

    def call_each(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run one call on each rank; the results, each a value or an exception."""
        for end, call in zip(self._ends, calls, strict=True):
            end.send(call)
        return self._answers(range(len(self._ends)))

    def send_call(self, rank: int, *call: Any) -> None:
        """Start a call on one rank; `result` returns its result."""
        self._ends[rank].send(call)

    def result(self, rank: int) -> Any:
        return self._answers([rank])[0]

    def call(self, rank: int, *call: Any) -> Any:
        """Run a call on one rank; raises what it raised."""
        self.send_call(rank, *call)
        return value(self.result(rank))

    def close(self) -> None:
        for end, process in zip(self._ends, self.processes, strict=True):
            if process.is_alive():
                end.send((None,))
        for process in self.processes:
            process.join(WAIT)
            if process.is_alive():
                process.kill()
                process.join()

    def _answers(self, ranks: Sequence[int]) -> list[Any]:
        found = []
        for rank in ranks:
            assert self._ends[rank].poll(WAIT), f"rank {rank} does not answer"
            found.append(self._ends[rank].recv())
        return found


def value(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return answer


class Stage:
    """The ranks of a diffusion stage, and the KV sink of the stage before, in this process.

    Args:
        sink_urls: URLs at which the ranks serve the next stage, one each.
    """

    def __init__(
        self, directory: str, dtype: str = "float32", sink_urls: Sequence[str] = (), **degrees: int
    ):
        self.dtype = getattr(torch, dtype)
        parallel = DiffusionParallelConfig(**degrees)
        url, options = f"shm://stage-{next(_numbers)}", {"directory": directory}
        sending = KVConfig(sinks=(url,), sink_options=options, receivers=parallel)
        self.kv_sink = KVSink(sending, heads=2)
        self.config = OmniDiffusionConfig(
            checkpoint(),
            dtype=dtype,
            num_threads=1,
            max_num_seqs=4,
            parallel_config=parallel,
            distributed_init_method=f"file://{directory}/rendezvous-{url[6:]}",
            kv=KVConfig(
                sources=(url,),
                sinks=tuple(sink_urls),
                source_options=options,
                sink_options=options,
                receivers=parallel,
                timeout=WAIT,
            ),
        )
        self.ranks = RankProcesses(self.config)

    def send(self, *batch: OmniDiffusionRequest) -> int:
        """Send the KV of requests; the sum of the sizes of their largest parts.

        A request id may be used again: first wait until its former payload is released, which the
        ranks report after they have answered.
        """
        # `stats()` counts what is live; here it is which, and by which key each part is sent.
        live: Any = end_of(self.kv_sink.link).transfers._live
        # As above.
        keys = {part.key(one.request_id) for one in batch for part in self.kv_sink._parts}
        deadline = time.monotonic() + WAIT
        while keys & set(live) and time.monotonic() < deadline:
            time.sleep(0.005)
        return sum(self.kv_sink.send(self.bundle_of(one)).nbytes for one in batch)

    def bundle_of(self, one: OmniDiffusionRequest) -> KVCacheBundle:
        """The KV of a request in the stage before."""
        own = one.sampling_params
        shape = (own.height or SHAPE[0], own.width or SHAPE[1])
        return bundle(one.request_id, one.prompt, own.seed or 0, shape, self.dtype)

    def close(self) -> None:
        self.ranks.close()
        self.kv_sink.close()


@contextmanager
def started(*made: Stage) -> Iterator[list[Stage]]:
    """Several stages whose ranks start at the same time."""
    try:
        for one in made:
            one.ranks.wait_ready()
        yield list(made)
    finally:
        for one in made:
            one.close()


# Functions that run in the ranks.


def _run_rank(rank: int, config: StageConfig, end: Connection) -> None:
    if isinstance(config, OmniARConfig):
        worker: Any = GPUARWorker(rank, rank, config)
    else:
        assert isinstance(config, OmniDiffusionConfig)
        worker = GPUDiffusionWorker(rank, rank, config)
    try:
        worker.init_device()
        end.send(None)
        while True:
            call, *args = end.recv()
            if call is None:
                break
            try:
                end.send(call(worker, *args))
            except BaseException as error:
                end.send(error)
    except BaseException as error:
        end.send(error)
    finally:
        worker.shutdown()


def receive(worker: Any, *requests: OmniDiffusionRequest) -> list[str]:
    """Receive the KV of requests; the state in which each ended."""
    manager, changed = worker.runner.kv_manager, threading.Condition()

    def wake() -> None:
        with changed:
            changed.notify_all()

    def states() -> list[KVState]:
        return [manager.state(one.request_id) for one in requests]

    manager.listen(wake)
    for one in requests:
        manager.allocate(one)
        manager.prefetch(one)
    with changed:
        assert changed.wait_for(lambda: KVState.RECEIVING not in states(), WAIT)
    return [state.value for state in states()]


def received(worker: Any, request_id: str) -> dict[str, tuple[Any, list[str]]]:
    """The branches of a KV that was received: metadata, and digests of the tensors."""
    data = worker.runner.kv_manager.get_kv_cache(request_id)
    return {name: (data[name].metadata, digests(data[name].tensors())) for name in data}


def execute(worker: Any, *requests: OmniDiffusionRequest) -> list[tuple[Any, Any]]:
    """Image and error of each request."""
    found = worker.execute_model(list(requests)).runner_outputs
    return [(one.result.output, one.result.error) for one in found]


def generate(worker: Any, *requests: OmniDiffusionRequest) -> tuple[list[Any], list[torch.Tensor]]:
    """Receive and execute requests; the images, and the latents of this rank."""
    pipeline, latents = worker.runner.pipeline, list[torch.Tensor]()
    original = type(pipeline).denoise_batch

    def recorded(*args: Any) -> Any:
        found = original(pipeline, *args)
        latents.extend(found)
        return found

    pipeline.denoise_batch = recorded
    try:
        if any(one.need_kv_receive for one in requests):
            assert set(receive(worker, *requests)) == {"ready"}
        outputs = execute(worker, *requests)
    finally:
        del pipeline.denoise_batch
    for _, error in outputs:
        if error is not None:
            raise error
    return [image for image, _ in outputs], latents


def enable_cache(worker: Any, name: str, config: dict[str, Any]) -> None:
    """Enable a cache backend."""
    runner = worker.runner
    runner.cache_backend = make_cache_backend(name, config)
    runner.cache_backend.enable(runner.pipeline)


def disable_cache(worker: Any) -> dict[str, int]:
    """Disable the cache backend; the passes that it saved, by branch."""
    runner = worker.runner
    saved = dict(runner.cache_backend.reused)
    runner.pipeline.hooks.layers = None
    runner.cache_backend = None
    return saved


def digest(tensor: Any) -> str:
    dense = tensor.contiguous().view(torch.uint8)
    return hashlib.sha256(dense.numpy().tobytes()).hexdigest()


def digests(tensors: Iterable[Any]) -> list[str]:
    return [digest(one) for one in tensors]


def requests(*names: str, edit: bool = False, **fields: Any) -> list[OmniDiffusionRequest]:
    """One for each name, whose seeds and prompts differ."""
    if edit:
        fields = {"height": None, "width": None, **fields}
    return [
        request(name, EDIT if edit else f"a fox {'and the other ' * at}", seed=at, **fields)
        for at, name in enumerate(names)
    ]
