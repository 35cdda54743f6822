"""`StageProcess`: a stage in a process of its own, on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.ipc.process import ProcessHandle
from omni_kvlink.engine.ipc.rpc import RpcClient
from omni_kvlink.engine.stage.remote_stage import RemoteStage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig


class StageProcess(RemoteStage):
    """A stage in a process that ends with this one; see `RemoteStage`.

    Args:
        config: of the stage.
        environment: variables of the process in addition to this one's.
        options: keyword arguments of `RemoteStage`.
    """

    def __init__(
        self,
        config: OmniARConfig | OmniDiffusionConfig,
        *,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ):
        self._environment = dict(environment or {})
        super().__init__(config, **options)

    def _start_process(self) -> RpcClient:
        config = self.config.served_at(self.sink_urls)
        handle = ProcessHandle(
            "stage.service:StageService",
            config,
            name=f"the {config.stage} stage",
            environment=self._environment,
        )
        return RpcClient(handle, self._on_process_death)
