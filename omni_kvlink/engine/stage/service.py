"""`StageService`: a stage's engine that is called from another process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.config import OmniARConfig, StageConfig
from omni_kvlink.engine.core.ar_engine import AREngine
from omni_kvlink.engine.core.stage_engine import DiffusionEngine
from omni_kvlink.engine.ipc.rpc import public_methods

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.engine.errors import EngineError


class StageService:
    """A stage's engine; `methods` can be called remotely.

    They are `start` and `watch`; after `start`, all public methods of the engine, too.
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
        self.methods |= public_methods(engine) | self.methods  # own methods hide the engine's
        return tuple(engine.sink_urls)

    def watch(self) -> Future[EngineError]:
        """A future whose result is why a worker of the stage is gone."""
        return self._death

    def close(self) -> bool:
        """Close the engine; returns True."""
        if self._engine is not None:
            self._engine.close()
        return True
