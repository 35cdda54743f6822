"""`MultiprocExecutor`: a process for each rank, on this machine."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile

from omni_kvlink.engine.executor.distributed import DistributedExecutor
from omni_kvlink.engine.ipc.process import ProcessHandle


class MultiprocExecutor(DistributedExecutor):
    """Runs each rank of a stage, of either kind, in a process of its own.

    Messages travel over socket pairs, large tensors in shared memory. The processes end with this
    one, however it ends.
    """

    _rendezvous = ""

    def _start_workers(self) -> None:
        ranks = self.config.parallel_config.world_size
        url = self.config.distributed_init_method
        if ranks > 1 and not url:
            self._rendezvous = tempfile.mkdtemp(prefix="kvl-ranks-")
            url = f"file://{self._rendezvous}/rendezvous"
        threads = self.config.num_threads
        if ranks > 1 and not threads and self.config.device_of(0).type == "cpu":
            threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        config = dataclasses.replace(self.config, distributed_init_method=url, num_threads=threads)
        service, directory = "worker.service:WorkerService", self._rendezvous
        for rank in range(ranks):
            name = f"rank {rank} of the {config.stage} stage"
            self._add_worker(
                ProcessHandle(service, config, [rank, rank], name=name, directory=directory)
            )

    def shutdown(self) -> None:
        """Shut down the processes, and release their memory; a second call does nothing."""
        super().shutdown()
        if self._rendezvous:
            shutil.rmtree(self._rendezvous, ignore_errors=True)
