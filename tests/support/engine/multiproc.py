"""A diffusion engine whose ranks are processes, and the link that sends it KV."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.engine import DiffusionEngine
from omni_kvlink.engine.config import DiffusionParallelConfig
from omni_kvlink.engine.core import ar_engine, stage_engine
from omni_kvlink.engine.executor import remote_kv
from support.engine.fixtures import WAIT, bundle, config, link, request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    import torch

    from omni_kvlink import KVProducer
    from omni_kvlink.engine.errors import EngineError
    from omni_kvlink.engine.ipc.rpc import RpcClient
    from omni_kvlink.engine.outputs import DiffusionOutput

# Reaches into _ANSWER_SECONDS, _STATS_TIMEOUT: no settings; a busy machine may take longer than
# they allow.


BATCHES_OF_TWO: dict[str, Any] = {"request_batch_max_wait_ms": 4 * WAIT * 1e3}
"""For two ranks: no batch begins before a request for each of them is there."""


class EngineUnderTest:
    """An engine, and the producer of its KV.

    Attributes:
        deaths: the arguments of the engine's `on_death` calls.
    """

    def __init__(self, producer: KVProducer, sockets: str, ranks: int, **fields: Any):
        self.producer, self.ranks = producer, ranks
        self.deaths: list[EngineError] = []
        options: dict[str, Any] = {
            "distributed_executor_backend": "mp",
            "max_num_seqs": ranks,
            "num_threads": 1,
            "parallel_config": DiffusionParallelConfig(data_parallel_size=ranks),
            **fields,
        }
        self.engine = DiffusionEngine(
            config(producer, sockets, **options), on_death=self.deaths.append
        )

    @property
    def executor(self) -> Any:
        return self.engine.executor

    @property
    def workers(self) -> list[RpcClient]:
        return list(self.executor.workers)

    def send(self, name: str, **options: Any) -> Any:
        return self.producer.put(bundle(name, **options))

    def submit(self, name: str, **fields: Any) -> Future[DiffusionOutput]:
        return self.engine.submit(request(name, **fields))

    def images(self, seeds: dict[str, int]) -> tuple[list[torch.Tensor], list[Any]]:
        """The images and the receipts of requests that all wait for their KV.

        No rank has the KV of two at once: they would be one batch, whose sums are rounded
        otherwise than those of one request.
        """
        pending = [self.submit(name, seed=seed) for name, seed in seeds.items()]
        images, receipts = [], []
        for first in range(0, len(seeds), self.ranks):
            turn = slice(first, first + self.ranks)
            receipts += [self.send(name, seed=seed) for name, seed in list(seeds.items())[turn]]
            images += [future.result(WAIT).result()[0] for future in pending[turn]]
        return images, receipts


@contextmanager
def patient_calls() -> Iterator[None]:
    """Workers that are not frozen have as long as they need to answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ar_engine, "_ANSWER_SECONDS", WAIT)
        patch.setattr(stage_engine, "_ANSWER_SECONDS", WAIT)
        patch.setattr(remote_kv, "_STATS_TIMEOUT", WAIT)
        yield


@contextmanager
def engine_with_ranks(
    sockets: str, ranks: int = 1, scheme: str = "shm", **fields: Any
) -> Iterator[EngineUnderTest]:
    """An engine; checks at the end that its processes are gone and the link's memory is free."""
    with patient_calls(), link(sockets, scheme) as producer:
        made = EngineUnderTest(producer, sockets, ranks, **fields)
        workers = made.workers
        try:
            yield made
        finally:
            workers += made.workers
            made.engine.close()
        assert all(worker.error for worker in workers)
