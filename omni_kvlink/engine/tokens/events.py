"""Events that a streamed request reports while it runs."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import torch


@dataclasses.dataclass
class TokenEvent:
    """Tokens of a request's text; `start` is the number of tokens before them.

    `text` is what they add to the text: empty while the bytes of a character are incomplete.
    """

    request_id: str
    start: int
    token_ids: list[int]
    text: str


@dataclasses.dataclass
class StepEvent:
    """A denoising step: `done` of `total`; newer ones replace those that nobody has read.

    `preview` is uint8 [num_outputs_per_prompt, H, W, 3] on the CPU: what the image would be if the
    flow went straight on, at most 256 pixels a side; None unless `preview_interval` asks for it.
    """

    request_id: str
    done: int
    total: int
    preview: torch.Tensor | None = None


Event: TypeAlias = TokenEvent | StepEvent


def merged(older: Event, newer: Event) -> Event | None:
    """One event for two successive ones of a request; None if they are of two kinds."""
    if isinstance(older, TokenEvent) and isinstance(newer, TokenEvent):
        tokens, text = older.token_ids + newer.token_ids, older.text + newer.text
        return TokenEvent(newer.request_id, older.start, tokens, text)
    if isinstance(older, StepEvent) and isinstance(newer, StepEvent):
        shown = older.preview if newer.preview is None else newer.preview
        return dataclasses.replace(newer, preview=shown)
    return None
