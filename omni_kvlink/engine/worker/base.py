"""What both kinds of worker are: a device, a place among the ranks, and memory to give back."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..config import OmniDiffusionConfig, StageConfig
from ..errors import EngineAsleepError
from ..kv_manager import DiffusionKVManager
from ..model import ModelUtility
from .offload import ParkedWeights, available_memory, drop_weights

TAGS = ("weights", "kv_cache")


class WorkerBase(ABC):
    """Infrastructure only: what loads a model, and runs it, is the runner.

    Args:
        local_rank: on this machine; chooses the device.
        rank: among all workers of the stage.
    """

    def __init__(self, local_rank: int, rank: int, config: StageConfig):
        self.local_rank, self.rank, self.config = local_rank, rank, config
        self.device = config.device_of(local_rank)
        self._parked: ParkedWeights | None = None
        self._level = 0
        self._joined = False

    @property
    @abstractmethod
    def utility(self) -> ModelUtility:
        """The runner's model."""

    @property
    def kv_manager(self) -> DiffusionKVManager | None:
        """The runner's, where KV comes from another stage."""
        return None

    def init_device(self) -> None:
        """Take the device, and meet the other ranks: NCCL on GPUs, gloo on CPUs.

        Subclasses make their runner then.
        """
        if self.config.num_threads:
            torch.set_num_threads(self.config.num_threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        config = self.config
        if isinstance(config, OmniDiffusionConfig) and config.parallel_config.world_size > 1:
            if not config.distributed_init_method:
                raise ValueError("several ranks need a place to meet: distributed_init_method")
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # named, it may be any
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                init_method=config.distributed_init_method,
                rank=self.rank,
                world_size=config.parallel_config.world_size,
            )
            self._joined = True

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
        modules = self.utility.modules()
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
            self.utility.reload()
        self._level = 0
        return True

    def determine_available_memory(self) -> int:
        """Bytes that the device could still take."""
        return available_memory(self.device)

    def check_health(self) -> bool:
        """An answer is all there is to it."""
        return True

    def shutdown(self) -> None:
        """Leave the other ranks, and give back what lies elsewhere; again does nothing."""
        if self._parked is not None:
            self._parked.drop()
            self._parked = None
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    def check_awake(self) -> None:
        """Raises EngineAsleepError while the weights are away."""
        if self._level:
            raise EngineAsleepError(f"asleep at level {self._level}: wake_up() first")
