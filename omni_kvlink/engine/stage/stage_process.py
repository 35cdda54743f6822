"""`StageProcess`: a stage in a process of its own, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig
from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.ipc.codec import pack_config
from omni_kvlink.engine.ipc.process_handle import ProcessHandle
from omni_kvlink.engine.stage.remote_stage import RemoteStage


class StageProcess(RemoteStage):
    """A stage in a child of this process, which ends with it; see `RemoteStage`.

    Args:
        environment: variables of the child besides this process's own.
    """

    _handle: ProcessHandle

    def __init__(
        self,
        config: OmniARConfig | OmniDiffusionConfig,
        *,
        environment: Mapping[str, str] | None = None,
        **how: Any,
    ):
        self._environment = dict(environment or {})
        super().__init__(config, **how)

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._handle.pid

    def _make(self, on_death: Callable[[EngineDeadError], None]) -> ProcessHandle:
        config = self.config.served_at(self.sink_urls)
        return ProcessHandle(
            "stage.stage_main",
            pack_config(config),
            name=f"the {config.stage} stage",
            on_death=on_death,
            environment=self._environment,
        )
