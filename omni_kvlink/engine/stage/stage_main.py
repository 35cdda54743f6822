"""A stage's process: `python -m omni_kvlink.engine.stage.stage_main DESCRIPTOR`."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from omni_kvlink.engine.config import OmniARConfig, StageConfig
from omni_kvlink.engine.core.ar_engine import AREngine
from omni_kvlink.engine.core.diffusion_engine import DiffusionEngine
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.ipc.channel import RpcChannel
from omni_kvlink.engine.ipc.codec import unpack_config
from omni_kvlink.engine.ipc.process import serve_calls
from omni_kvlink.engine.ipc.rpc import public_methods


class StageService:
    """A stage's engine whose methods can be called remotely.

    Args:
        config: of the stage.

    Attributes:
        methods: what can be called, by name: `start` and `watch`; after `start`, all public methods
            of the engine, too.
    """

    def __init__(self, config: StageConfig):
        self._config = config
        self._engine: AREngine | DiffusionEngine | None = None
        self._death: Future[EngineError] = Future()
        self.methods: dict[str, Callable[..., Any]] = {"start": self.start, "watch": self.watch}

    def start(self) -> tuple[str, ...]:
        """Load the model, open the links, and return the URLs that the next stage connects to."""
        kind: Any = AREngine if isinstance(self._config, OmniARConfig) else DiffusionEngine
        self._engine = engine = kind(self._config, on_death=self._death.set_result)
        self.methods |= public_methods(engine)
        urls: tuple[str, ...] = engine.sink_urls
        return urls

    def watch(self) -> Future[EngineError]:
        """A future whose result is why a worker of the stage is gone."""
        return self._death

    def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            self._engine.close()


def main() -> None:
    """Serve calls until the process that started this one closes the channel or is gone."""
    channel = RpcChannel(socket.socket(fileno=int(sys.argv[1])))
    try:
        with contextlib.closing(StageService(unpack_config(channel.receive()))) as service:
            serve_calls(channel, service.methods)
    finally:
        channel.join()


if __name__ == "__main__":
    main()
