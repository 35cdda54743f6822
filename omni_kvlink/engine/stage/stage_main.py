"""A stage in a process of its own: `python -m omni_kvlink.engine.stage.stage_main DESCRIPTOR`."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from omni_kvlink.engine.config import OmniARConfig, StageConfig
from omni_kvlink.engine.core.ar_engine import AREngine
from omni_kvlink.engine.core.diffusion_engine import DiffusionEngine
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.ipc.channel import RpcChannel
from omni_kvlink.engine.ipc.codec import unpack_config
from omni_kvlink.engine.ipc.futures import settle
from omni_kvlink.engine.ipc.process_handle import serve_calls


class StageService:
    """An engine's methods, for who is elsewhere; `start` comes first.

    Args:
        config: of the stage.
    """

    def __init__(self, config: StageConfig):
        self._config = config
        self._engine: AREngine | DiffusionEngine | None = None
        self._death: Future[EngineError] = Future()

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        home = self if method in ("start", "watch") else self._engine
        settle(answer, lambda: getattr(home, method)(*args, **kwargs))
        return answer

    def start(self) -> tuple[str, ...]:
        """Load the model and open the links; what the next stage connects to."""
        kind: Any = AREngine if isinstance(self._config, OmniARConfig) else DiffusionEngine
        self._engine = kind(self._config, on_death=self._death.set_result)
        return self._engine.sink_urls

    def watch(self) -> Future[EngineError]:
        """Answers when a worker of the stage is gone."""
        return self._death

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def main() -> None:
    channel = RpcChannel(socket.socket(fileno=int(sys.argv[1])))
    try:
        with contextlib.closing(StageService(unpack_config(channel.receive()))) as service:
            serve_calls(channel, service.call)
    finally:
        channel.release()


if __name__ == "__main__":
    main()
