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
    """A stage in a process that ends with this one; see `RemoteStage`, which takes `options`.

    The process has this one's environment variables, and those in `environment`.
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
        config, name = self.config.served_at(self.sink_urls), f"the {self.config.stage} stage"
        service, environment = "stage.service:StageService", self._environment
        handle = ProcessHandle(service, config, name=name, environment=environment)
        return RpcClient(handle, self._on_process_death)
