"""`KVSent`: what a stage says of the KV that it sent."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class KVSent:
    """A request's KV that was sent: the largest size that a rank of the next stage receives."""

    nbytes: int
    image_shape: tuple[int, int] | None = None  # (height, width), in pixels
    tokens: int = 0  # of its longest context
    has_hidden_states: bool = False  # they were sent, too
