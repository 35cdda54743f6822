"""`SupportsStepExecution`: what a pipeline has whose requests run one denoising step at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.engine.outputs import DiffusionOutput
    from omni_kvlink.engine.request import OmniDiffusionRequest


class StepRequestState(Protocol):
    """A request between two denoising steps; the pipeline's own, and only the pipeline reads it."""

    @property
    def denoise_completed(self) -> bool:
        """Whether all of its steps are done."""


class SupportsStepExecution(Protocol):
    """A pipeline that the runner calls for each step, with `supports_step_execution = True`."""

    supports_step_execution: bool

    def prepare_encode(self, request: OmniDiffusionRequest) -> Any:
        """A request's `StepRequestState` before its first step; called once.

        A request whose KV comes from the stage before has it as `past_key_values`.
        """

    def denoise_step(self, states: Sequence[Any]) -> Sequence[Any]:
        """The noise prediction of each request's next step, in one pass; changes no state.

        The requests have one value of each of `STEP_KEY_FIELDS`; their steps differ.
        """

    def step_scheduler(self, state: Any, noise_pred: Any) -> None:
        """Take a request's next step with its noise prediction."""

    def post_decode(self, state: Any) -> DiffusionOutput:
        """The output of a request whose steps are done."""


def supports_step_execution(pipeline: object) -> bool:
    """Whether the pipeline's class says that it has the methods of `SupportsStepExecution`."""
    return getattr(type(pipeline), "supports_step_execution", False) is True
