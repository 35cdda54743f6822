"""`EngineCore`: one step after the other."""

from __future__ import annotations

from omni_kvlink.engine.errors import EngineDeadError, EngineError
from omni_kvlink.engine.executor import Executor
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.sched.scheduler import Scheduler

_STABLE = 0.25
"""Share of the admission wait after which a queue that does not grow counts as stable."""


class EngineCore:
    """schedule → execute → update, for a stage of either kind; used by one thread.

    Args:
        scheduler: says what runs.
        executor: runs it.
        max_wait: seconds that a first request may wait for companions; 0 for not at all.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, max_wait: float = 0.0):
        self.scheduler, self.executor = scheduler, executor
        self._max_wait = max_wait

    def step(self) -> list[DiffusionOutput]:
        """Run one batch, if there is one; the outputs of all requests that have ended since.

        Raises:
            Nothing of a request: each has its own error. When the workers are gone, that is the
            error of all that ran.
        """
        if self._max_wait:
            self.scheduler.wait_for_companions(
                timeout=self._max_wait, stable=self._max_wait * _STABLE
            )
        scheduled = self.scheduler.schedule()
        ended = self.take_ended()
        if scheduled.is_empty:
            return ended
        try:
            results = self.executor.execute_model(scheduled)
        except EngineError as error:
            return ended + self.scheduler.fail_running(error)
        except Exception as error:
            failure = EngineDeadError(f"the executor failed: {error!r}")
            failure.__cause__ = error
            return ended + self.scheduler.fail_running(failure)
        return ended + self.scheduler.update_from_output(scheduled, results)

    def take_ended(self) -> list[DiffusionOutput]:
        """Requests that ended without running; the next stage is told. From any thread."""
        ended = self.scheduler.take_ended()
        for output in ended:
            self.executor.fail_kv(output.request_id, str(output.error))
        return ended

    def abort(self, request_id: str) -> None:
        """End a request; may be called from any thread."""
        if self.scheduler.abort_request(request_id):
            self.executor.abort(request_id)
