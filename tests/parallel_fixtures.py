"""Ranks of a stage, each a process of its own, that do what a test tells all of them."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from engine_fixtures import bundle, checkpoint, request

from omni_kvlink import KVCacheBundle
from omni_kvlink.engine import (
    DiffusionParallelConfig,
    KVConfig,
    OmniARConfig,
    OmniDiffusionConfig,
    OmniDiffusionRequest,
    StageConfig,
)
from omni_kvlink.engine.kv.kv_entry import KVState
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.step_cache.cache_backend import make_cache_backend
from omni_kvlink.engine.worker import GPUARWorker, GPUDiffusionWorker

PATIENCE = 60.0
_numbers = itertools.count()
EDIT = [torch.arange(64 * 48 * 3).reshape(64, 48, 3).to(torch.uint8), "make it night"]


class Ranks:
    """All ranks of a stage; they have met, and loaded their models."""

    def __init__(self, config: StageConfig):
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(config.parallel_config.world_size):
            mine, theirs = context.Pipe()
            self._ends.append(mine)
            self.processes.append(context.Process(target=_live, args=(rank, config, theirs)))
        for process in self.processes:
            process.start()

    def meet(self) -> Ranks:
        self._answers(range(len(self._ends)))
        return self

    def all(self, call: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank answers to the same; raises what one of them raised."""
        return [value(answer) for answer in self.ask([(call, *args)] * len(self._ends))]

    def ask(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What each rank answers to a call of its own: a value, or an exception."""
        for end, call in zip(self._ends, calls, strict=True):
            end.send(call)
        return self._answers(range(len(self._ends)))

    def tell(self, rank: int, *call: Any) -> None:
        """One rank's call, whose answer `answer` gives."""
        self._ends[rank].send(call)

    def answer(self, rank: int) -> Any:
        return self._answers([rank])[0]

    def on(self, rank: int, *call: Any) -> Any:
        """What one rank answers; raises what it raised."""
        self.tell(rank, *call)
        return value(self.answer(rank))

    def close(self) -> None:
        for end, process in zip(self._ends, self.processes, strict=True):
            if process.is_alive():
                end.send((None,))
        for process in self.processes:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()

    def _answers(self, ranks: Sequence[int]) -> list[Any]:
        found = []
        for rank in ranks:
            assert self._ends[rank].poll(PATIENCE), f"rank {rank} does not answer"
            found.append(self._ends[rank].recv())
        return found


def value(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return answer


class Stage:
    """Ranks that paint, and the end of the stage before, which is this process.

    Args:
        onward: URLs that they hand KV on by, one each.
    """

    def __init__(
        self, directory: str, dtype: str = "float32", onward: Sequence[str] = (), **degrees: int
    ):
        self.dtype = getattr(torch, dtype)
        parallel = DiffusionParallelConfig(**degrees)
        url, options = f"shm://stage-{next(_numbers)}", {"directory": directory}
        sending = KVConfig(sinks=(url,), sink_options=options, receivers=parallel)
        self.handover = KVSink(sending, heads=2)
        self.config = OmniDiffusionConfig(
            checkpoint(),
            dtype=dtype,
            num_threads=1,
            max_num_seqs=4,
            parallel_config=parallel,
            distributed_init_method=f"file://{directory}/meet-{url[6:]}",
            kv=KVConfig(
                sources=(url,),
                sinks=tuple(onward),
                source_options=options,
                sink_options=options,
                receivers=parallel,
                timeout=20,
            ),
        )
        self.ranks = Ranks(self.config)

    def send(self, *wanted: OmniDiffusionRequest) -> int:
        """The KV of requests; the largest share of each, in all."""
        return sum(self.handover.send(self.bundle_of(one)).nbytes for one in wanted)

    def bundle_of(self, one: OmniDiffusionRequest) -> KVCacheBundle:
        """What the stage before has of it."""
        return bundle(one.request_id, one.prompt, one.sampling_params.seed, dtype=self.dtype)

    def close(self) -> None:
        self.ranks.close()
        self.handover.close()


@contextmanager
def stages(*made: Stage) -> Iterator[list[Stage]]:
    """Several, started at once."""
    try:
        for one in made:
            one.ranks.meet()
        yield list(made)
    finally:
        for one in made:
            one.close()


# In the ranks.


def _live(rank: int, config: StageConfig, end: Connection) -> None:
    if isinstance(config, OmniARConfig):
        worker: Any = GPUARWorker(rank, rank, config)
    else:
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
    """Fetch the KV of requests; how each ended."""
    manager, over = worker.runner.kv_manager, threading.Condition()

    def wake() -> None:
        with over:
            over.notify_all()

    def states() -> list[KVState]:
        return [manager.state(one.request_id) for one in requests]

    manager.listen(wake)
    for one in requests:
        manager.allocate(one)
        manager.prefetch(one)
    with over:
        assert over.wait_for(lambda: KVState.RECEIVING not in states(), PATIENCE)
    return [state.value for state in states()]


def received(worker: Any, request_id: str) -> dict[str, tuple[Any, list[str]]]:
    """Each branch of a KV that is held: its metadata, and digests of its tensors."""
    data = worker.runner.kv_manager.get_kv_cache(request_id)
    return {name: (data[name].metadata, digests(data[name].tensors())) for name in data}


def execute(worker: Any, *requests: OmniDiffusionRequest) -> list[tuple[Any, Any]]:
    """Image and error of each request."""
    found = worker.execute_model(list(requests)).runner_outputs
    return [(one.result.output, one.result.error) for one in found]


def painted(worker: Any, *requests: OmniDiffusionRequest) -> tuple[list[Any], list[torch.Tensor]]:
    """Receive and execute: images, and the latents that were integrated here."""
    pipeline, latents = worker.runner.pipeline, list[torch.Tensor]()
    original = type(pipeline).denoise_batch

    def noted(*args: Any) -> Any:
        found = original(pipeline, *args)
        latents.extend(found)
        return found

    pipeline.denoise_batch = noted
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


def accelerate(worker: Any, name: str, config: dict[str, Any]) -> None:
    """Use a cache backend."""
    runner = worker.runner
    runner.cache_backend = make_cache_backend(name, config)
    runner.cache_backend.enable(runner.pipeline)


def slow_down(worker: Any) -> dict[str, int]:
    """Do without it again; the passes that were saved, by branch."""
    runner = worker.runner
    saved = dict(runner.cache_backend.memory.reused)
    setattr(runner.pipeline.hooks, runner.cache_backend.hook, None)
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
