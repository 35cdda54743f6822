"""`MultiprocExecutor`: a process for each rank, on this machine."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile

from omni_kvlink.engine.config import StageConfig
from omni_kvlink.engine.executor.distributed import DeathCallback, DistributedExecutor
from omni_kvlink.engine.ipc.codec import pack_config
from omni_kvlink.engine.ipc.process_handle import ProcessHandle


class MultiprocExecutor(DistributedExecutor):
    """A stage of either kind, its ranks in processes of their own; one rank is allowed, too.

    Requests and images cross by socket pairs, large tensors in shared memory. Processes end with
    this one, however it ends.
    """

    def _make_workers(self, on_death: DeathCallback) -> None:
        parallel = self.config.parallel_config
        self._meeting = ""
        where = self.config.distributed_init_method
        if parallel.world_size > 1 and not where:
            self._meeting = tempfile.mkdtemp(prefix="kvl-ranks-")
            where = f"file://{self._meeting}/meet"
        config = dataclasses.replace(
            self.config, distributed_init_method=where, num_threads=_threads(self.config)
        )
        for rank in range(parallel.world_size):
            first = {"config": pack_config(config), "rank": rank, "meeting": self._meeting}
            name = f"rank {rank} of the {config.stage} stage"
            worker = ProcessHandle("executor.worker_main", first, name=name, on_death=on_death)
            self.workers.append(worker)

    def shutdown(self) -> None:
        super().shutdown()
        if self._meeting:
            shutil.rmtree(self._meeting, ignore_errors=True)


def _threads(config: StageConfig) -> int:
    """Of torch in each rank: its share of the CPUs, where nobody said it and they paint there."""
    ranks = config.parallel_config.world_size
    if config.num_threads or ranks == 1 or config.device_of(0).type != "cpu":
        return config.num_threads
    return max(1, len(os.sched_getaffinity(0)) // ranks)
