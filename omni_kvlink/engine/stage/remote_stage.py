"""`RemoteStage`: a stage whose engine runs in another process."""

from __future__ import annotations

import threading
from abc import abstractmethod
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from omni_kvlink.engine.config import OmniARConfig
from omni_kvlink.engine.core.ar_engine import AREngine
from omni_kvlink.engine.core.stage_engine import DiffusionEngine, StageCalls
from omni_kvlink.engine.errors import EngineDeadError, EngineError
from omni_kvlink.engine.ipc.process import ProcessHandle
from omni_kvlink.engine.ipc.rpc import RpcClient, public_methods
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.errors import ClosedError, KVLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_kvlink.engine.config import OmniDiffusionConfig, StageConfig
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.engine.tokens.events import Event

S = TypeVar("S", bound="RemoteStage")


class RemoteStage(StageCalls):
    """The methods of `StageEngine`, executed in another process; thread-safe; a context manager.

    `on_death` is called once, from another thread, when the stage, or a worker of it, is gone. The
    constructor raises what loading the model and opening the links raises, and TransferTimeout if
    that takes more than the configuration's `start_timeout`.

    Attributes:
        sink_urls: what the next stage connects to, by tensor rank; empty if this is the last one.
    """

    def __init__(
        self,
        config: OmniARConfig | OmniDiffusionConfig,
        *,
        on_death: Callable[[EngineError], None] | None = None,
    ):
        self.config, self._on_death = config, on_death
        self._lock = threading.Lock()
        self._closed = False
        self.sink_urls: tuple[str, ...] = ()
        self._start()

    @abstractmethod
    def _start_process(self) -> RpcClient:
        """Start a process with a `StageService`, which serves at `sink_urls` if there are any.

        The client reports the end of the process to `_on_process_death`.
        """

    @property
    def pid(self) -> int:
        """Process id of the stage."""
        return self._client.pid

    def submit(self, request: OmniDiffusionRequest) -> Future[DiffusionOutput]:
        """Queue a request; its future has the output, which may hold the request's error.

        Raises EngineDeadError if the stage is gone: `restart` it; EngineError if the id is in use.
        """
        future: Future[DiffusionOutput] = Future()
        future.set_running_or_notify_cancel()
        key = request.request_id
        with self._lock:
            self._check_alive()
            if key in self._open:
                raise EngineError(f"request {key!r} is here already")
            self._open.add(key)
        answer = self._client.call("submit", [request])
        answer.add_done_callback(partial(self._on_output, key, future))
        return future

    def abort(self, request_id: str) -> None:
        """Abort a request in any state; unknown ones are ignored. Returns at once."""
        self._client.call("abort", [request_id])

    def fail_kv(self, request_id: str, reason: str) -> None:
        """Release the KV sent for a request that the next stage will not receive; does not wait."""
        self._client.call("fail_kv", [request_id, reason])

    def take_events(self) -> Future[list[Event]]:
        """A future of the next events of streamed requests; it fails if the stage is gone."""
        return self._client.call("take_events")

    def stats(self, *, timeout: float = 10.0) -> dict[str, Any]:
        """Queues, steps and memory in use, as JSON values."""
        return dict(self._request("stats", [], timeout))

    def restart(self) -> None:
        """Start the stage again at the same URLs; requests of before have failed."""
        self._shutdown()
        self._start()

    def close(self) -> None:
        """Shut the stage down, and fail its requests; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._shutdown()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        self._dead: KVLinkError | None = None
        self._open: set[str] = set()
        self._client = self._start_process()
        try:
            self.sink_urls = self._client.request(
                "start", timeout=self.config.start_timeout, phase="starting"
            )
        except BaseException:
            self._shutdown()
            raise
        self._client.call("watch").add_done_callback(self._on_worker_death)

    def _on_output(
        self, key: str, future: Future[DiffusionOutput], answer: Future[DiffusionOutput]
    ) -> None:
        self._open.discard(key)
        error: Any = answer.exception()
        future.set_result(answer.result() if error is None else DiffusionOutput(key, error=error))

    def _on_worker_death(self, answer: Future[EngineError]) -> None:
        # the future fails if the whole process dies, which `_on_process_death` handles
        if answer.exception() is None and self._on_death is not None:
            self._on_death(answer.result())

    def _on_process_death(self, error: EngineDeadError) -> None:
        self._dead = error
        if self._on_death is not None:
            self._on_death(error)

    def _call_executor(self, method: str, args: Sequence[Any], timeout: float) -> Any:
        return self._request(method, args, timeout)

    def _request(self, method: str, args: Sequence[Any], timeout: float) -> Any:
        self._check_alive()
        return self._client.request(method, args, timeout=timeout)

    def _shutdown(self) -> None:
        self._client.shutdown()
        self._client.join()

    def _check_alive(self) -> None:
        if self._closed:
            raise ClosedError("the stage is closed")
        if self._dead is not None:
            raise EngineDeadError(f"{self._dead}: restart() first")


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
        service, environment = "stage.remote_stage:StageService", self._environment
        handle = ProcessHandle(service, config, name=name, environment=environment)
        return RpcClient(handle, self._on_process_death)


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
