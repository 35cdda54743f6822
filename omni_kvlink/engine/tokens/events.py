"""Events that a streamed request reports while it runs."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future
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


class EventBuffer:
    """Holds events in their order; thread-safe, and `put` never waits for a reader.

    What is not taken yet is merged: a request has at most two events here, its tokens, all of them,
    and its newest denoising step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[tuple[str, type[Event]], Event] = {}
        self._taker: Future[list[Event]] | None = None

    def put(self, event: Event) -> None:
        """Add an event; if `take` waits, its future is resolved here."""
        key = (event.request_id, type(event))
        with self._lock:
            older = self._events.get(key)
            self._events[key] = (older and merged(older, event)) or event
            taker, self._taker = self._taker, None
            events = self._take() if taker is not None else []
        if taker is not None:
            taker.set_result(events)

    def take(self) -> Future[list[Event]]:
        """A future of the events since the last call, of at least one; for one caller at a time.

        An earlier call that still waits gets an empty list, as after `close`.
        """
        taker: Future[list[Event]] = Future()
        taker.set_running_or_notify_cancel()
        with self._lock:
            waiting, events = self._taker, self._take()
            self._taker = None if events else taker
        if events:
            taker.set_result(events)
        if waiting is not None:
            waiting.set_result([])
        return taker

    def close(self) -> None:
        """Let a call that waits return an empty list."""
        with self._lock:
            taker, self._taker = self._taker, None
        if taker is not None:
            taker.set_result([])

    def _take(self) -> list[Event]:
        events = [*self._events.values()]
        self._events = {}
        return events
