"""`Recorder`: an observer that keeps what it sees, without what may hold memory of a link."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import without_frames
from omni_kvlink.telemetry.observers import Observer, TransferEvent, add_observer, remove_observer

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorder(Observer):
    """Keeps every event, in the order of each kind."""

    def __init__(self) -> None:
        self.puts: list[TransferEvent] = []
        self.receipts: list[TransferEvent] = []
        self.gets: list[TransferEvent] = []
        self.copies: list[TransferEvent] = []
        self.metadata: list[Any] = []

    def on_put(self, event: TransferEvent) -> None:
        self.puts.append(_kept(event))

    def on_receipt(self, event: TransferEvent) -> None:
        self.receipts.append(_kept(event))

    def on_get(self, event: TransferEvent) -> None:
        self.gets.append(_kept(event))
        if event.data is not None:
            self.metadata.append(dict(getattr(event.data, "metadata", {})))

    def on_copy(self, event: TransferEvent) -> None:
        self.copies.append(_kept(event))

    def outcomes(self) -> list[list[str]]:
        """Of puts, receipts, gets and copies."""
        kinds = self.puts, self.receipts, self.gets, self.copies
        return [[event.outcome for event in events] for events in kinds]


class Raising(Observer):
    """Raises whatever it sees."""

    def on_put(self, event: TransferEvent) -> None:
        raise RuntimeError(f"of the observer, at {event.key}")

    on_receipt = on_get = on_copy = on_put


@contextlib.contextmanager
def observing(recorder: Recorder) -> Iterator[Recorder]:
    """Register an observer while a block runs."""
    add_observer(recorder)
    try:
        yield recorder
    finally:
        remove_observer(recorder)


def _kept(event: TransferEvent) -> TransferEvent:
    error = event.error and without_frames(type(event.error)(str(event.error)))
    return event._replace(data=None, error=error, seconds=dict(event.seconds))
