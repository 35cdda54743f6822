"""`Profiler`: what a worker computes and for how long, as a Chrome trace."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import profiler

from omni_kvlink.engine.errors import EngineError

if TYPE_CHECKING:
    from omni_kvlink.engine.config import ProfilerConfig, StageConfig

# torch has one recording in a process: a second one would end the first without a word.
_PROCESS = threading.Lock()


class Profiler:
    """Records one worker's operators, of its CPU thread and its GPU; used in the model's thread."""

    def __init__(self, name: str, config: ProfilerConfig):
        self.name, self.config = name, config  # the name is that of the trace's file
        self._recording: profiler.profile | None = None
        self._path = Path()

    @classmethod
    def of(cls, config: StageConfig, rank: int) -> Profiler:
        """The profiler of a stage's rank."""
        return cls(f"{config.stage}-rank{rank}", config.profiler_config)

    def start(self, directory: str) -> None:
        """Record from now on. The directory is made; a trace of the same name there is replaced.

        Raises:
            EngineError: this worker, or another one of this process, is being profiled.
            OSError: the directory cannot be made.
        """
        if self._recording is not None:
            raise EngineError(f"{self.name} is being profiled: stop_profile() first")
        Path(directory).mkdir(parents=True, exist_ok=True)
        config = self.config
        suffix = ".trace.json.gz" if config.torch_profiler_use_gzip else ".trace.json"
        self._path = Path(directory).absolute() / f"{self.name}{suffix}"
        kinds = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(profiler.ProfilerActivity.CUDA)
        if not _PROCESS.acquire(blocking=False):
            raise EngineError(
                f"{self.name}: another worker of this process is being profiled; with own_process: "
                "true a stage has a process of its own"
            )
        self._recording = profiler.profile(
            activities=kinds,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
        )
        self._recording.start()

    def stop(self) -> str:
        """Write the trace and return its path; raises EngineError unless `start` was called."""
        if self._recording is None:
            raise EngineError(f"{self.name} is not being profiled: start_profile() first")
        recording = self._recording
        self.close()
        recording.export_chrome_trace(str(self._path))
        return str(self._path)

    def close(self) -> None:
        """Record no longer, and write nothing; idempotent."""
        if self._recording is not None:
            recording, self._recording = self._recording, None
            try:
                recording.stop()
            finally:
                _PROCESS.release()


class ProfiledRank:
    """Has a `Profiler`."""

    profiler: Profiler

    def start_profile(self, directory: str) -> None:
        """Record what this rank computes until `stop_profile`, which writes it to `directory`."""
        self.profiler.start(directory)

    def stop_profile(self) -> str:
        """Write the Chrome trace; returns its path, on this machine."""
        return self.profiler.stop()
