"""What an AR stage's scheduler gives its executor."""

from __future__ import annotations

import dataclasses

from omni_kvlink.engine.outputs import DiffusionSchedulerOutput


@dataclasses.dataclass
class ARSchedulerOutput(DiffusionSchedulerOutput):
    """A step of an AR stage: `requests` begin with it, `cached_request_ids` go on.

    `block_ids` has the blocks of each new request's KV, by branch, in token order. The first
    `num_computed_tokens` of the first branch are in them already; none if the request is missing.
    """

    block_ids: dict[str, dict[str, list[int]]] = dataclasses.field(default_factory=dict)
    cached_request_ids: list[str] = dataclasses.field(default_factory=list)
    num_computed_tokens: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def request_ids(self) -> list[str]:
        """The ids of all requests of the step, in the order of their arrival."""
        return [*self.cached_request_ids, *super().request_ids]
