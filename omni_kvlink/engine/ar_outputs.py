"""The output of an AR stage's scheduler for its executor."""

from __future__ import annotations

import dataclasses

from omni_kvlink.engine.outputs import StepSchedulerOutput


@dataclasses.dataclass
class ARSchedulerOutput(StepSchedulerOutput):
    """A step of an AR stage.

    `block_ids` has the blocks of each new request's KV, by branch, in token order. The first
    `num_computed_tokens` of the first branch are in them already; none if the request is missing.
    """

    block_ids: dict[str, dict[str, list[int]]] = dataclasses.field(default_factory=dict)
    num_computed_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
