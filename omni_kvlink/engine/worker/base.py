"""What both kinds of worker are: a device, a place among the ranks, and memory to give back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from omni_kvlink.engine.config import StageConfig
from omni_kvlink.engine.errors import EngineAsleepError, EngineError
from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.worker.model import ModelUtility
from omni_kvlink.engine.worker.offload import ParkedWeights, available_memory, drop_weights

TAGS = ("weights", "kv_cache")


class Runner(Protocol):
    """What a worker asks of its runner, of either kind."""

    utility: ModelUtility
    kv_manager: DiffusionKVManager | None
    handover: KVSink | None

    def abort(self, request_id: str) -> None: ...
    def close(self) -> None: ...


R = TypeVar("R", bound=Runner)


class WorkerBase(ABC, Generic[R]):
    """Infrastructure only: what loads a model, and runs it, is the runner.

    Args:
        local_rank: on this machine; chooses the device.
        rank: among all workers of the stage.

    Attributes:
        mates: the ranks that this one works with; met by `init_device`.
        model_runner: has the model and its KV; made by `init_device`.
    """

    def __init__(self, local_rank: int, rank: int, config: StageConfig):
        self.local_rank, self.rank, self.config = local_rank, rank, config
        self.device = config.device_of(local_rank)
        self.model_runner: R | None = None
        self._parked: ParkedWeights | None = None
        self._level = 0
        self.mates = ProcessGroup()

    @abstractmethod
    def _make_runner(self) -> R:
        """The runner of this kind of stage."""

    @property
    def runner(self) -> R:
        """Raises EngineError before `init_device` has made it."""
        if self.model_runner is None:
            raise EngineError("this worker has no runner yet: init_device() makes it")
        return self.model_runner

    def init_device(self) -> None:
        """Take the device, meet the other ranks (NCCL on GPUs, gloo on CPUs), make the runner."""
        if self.config.num_threads:
            torch.set_num_threads(self.config.num_threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.mates = ProcessGroup.join(self.rank, self.config, self.device)
        self.model_runner = self._make_runner()

    def sleep(self, level: int = 1) -> bool:
        """Take the weights out of the device's memory.

        Args:
            level: 1 keeps them elsewhere; 2 drops them, to be read from the checkpoint again.

        Returns:
            Whether it was awake.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}; there are 1 and 2")
        if self._level:
            return False
        modules = self.runner.utility.modules()
        if level == 1:
            self._parked = ParkedWeights(modules)
        else:
            drop_weights(modules)
        self._level = level
        return True

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Bring back what `sleep` took.

        Args:
            tags: of "weights" and "kv_cache"; both if None.

        Returns:
            Whether anything was asleep.
        """
        strange = sorted(set(tags or ()) - set(TAGS))
        if strange:
            raise ValueError(f"tags {strange}; there are {', '.join(TAGS)}")
        if not self._level or (tags is not None and "weights" not in tags):
            return False
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        else:
            self.runner.utility.reload()
        self._level = 0
        return True

    def determine_available_memory(self) -> int:
        """Bytes that the device could still take."""
        return available_memory(self.device)

    def check_health(self) -> bool:
        """An answer is all there is to it."""
        return True

    def abort(self, request_id: str) -> None:
        """A running request ends as soon as it can; may be called while `execute_model` runs."""
        self.runner.abort(request_id)

    def fail_kv(self, request_id: str, reason: str) -> None:
        """Tell the next stage that this request's KV will not come."""
        if self.runner.handover is not None:
            self.runner.handover.fail(request_id, reason)

    def sink_url(self) -> str:
        """What the next stage connects to; empty if there is none."""
        return "" if self.runner.handover is None else self.runner.handover.link.url

    def sink_stats(self) -> dict[str, Any]:
        """Of the link to the next stage; empty if there is none."""
        return {} if self.runner.handover is None else self.runner.handover.link.stats()

    def shutdown(self) -> None:
        """Leave the other ranks, and give everything back; again does nothing."""
        if self._parked is not None:
            self._parked.drop()
            self._parked = None
        self.mates.close()
        if self.model_runner is not None:
            self.model_runner.close()

    def check_awake(self) -> None:
        """Raises EngineAsleepError while the weights are away."""
        if self._level:
            raise EngineAsleepError(f"asleep at level {self._level}: wake_up() first")
