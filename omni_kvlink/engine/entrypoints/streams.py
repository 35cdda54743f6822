"""`RequestStream`: the events of one request, in their order, until its output."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.tokens.events import Event, TokenEvent, merged

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from concurrent.futures import Future

    from omni_kvlink.engine.core.stage_engine import DiffusionEngine
    from omni_kvlink.engine.stage.remote_stage import RemoteStage


@dataclasses.dataclass
class OutputEvent:
    """The last event of a request: its output."""

    output: DiffusionOutput


StreamEvent: TypeAlias = "Event | OutputEvent"


class RequestStream:
    """An iterator of a request's events: first its tokens, then denoising steps, then its output.

    The iterator blocks until there is an event. It raises the error of a request that failed or was
    aborted instead of an `OutputEvent`, also a second time. A slow reader holds up nothing: what it
    has not read is merged, so that it gets all tokens, and the newest step with the newest preview.
    `close` aborts a request that runs; a context manager.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]):
        self.request_id, self._abort = request_id, abort
        self._changed = threading.Condition()
        self._events: list[StreamEvent] = []
        self._count, self._text = 0, ""  # of the tokens that were put, and their text
        self._ended: DiffusionOutput | None = None
        self._on_change: Callable[[], None] | None = None

    def __iter__(self) -> RequestStream:
        return self

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __next__(self) -> StreamEvent:
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._ended is not None)
            event = self.take()
        if event is None:
            raise StopIteration
        return event

    def take(self) -> StreamEvent | None:
        """The next event without waiting; None if there is none now. Raises the request's error."""
        with self._changed:
            if self._events:
                return self._events.pop(0)
            if self._ended is not None and self._ended.error is not None:
                raise self._ended.error
            return None

    @property
    def is_done(self) -> bool:
        """Whether every event was read, and the request did not fail."""
        with self._changed:
            return self._ended is not None and self._ended.error is None and not self._events

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, whenever `take` may have more to return; now, too."""
        self._on_change = callback
        callback()

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if self._ended is None:
            self._abort(self.request_id)

    def put(self, event: Event) -> None:
        """Add an event of a stage; one whose tokens came already is ignored."""
        with self._changed:
            if self._ended is not None:
                return
            if isinstance(event, TokenEvent):
                if event.start < self._count:
                    return
                self._count += len(event.token_ids)
                self._text += event.text
            last = self._events[-1] if self._events else None
            union = None if last is None or isinstance(last, OutputEvent) else merged(last, event)
            self._events[-1:] = [union] if union is not None else [*self._events[-1:], event]
        self._notify()

    def put_rest(self, output: DiffusionOutput) -> None:
        """Add the tokens of a stage's output that did not come as events."""
        ids, text = output.token_ids or [], output.text or ""
        with self._changed:  # no event of the stage may come in between
            new_ids, new_text = ids[self._count :], text[len(self._text) :]
            if new_ids or new_text:
                self.put(TokenEvent(self.request_id, self._count, new_ids, new_text))

    def end(self, output: DiffusionOutput) -> None:
        """Add the request's output; nothing may be put after it."""
        with self._changed:
            self._ended = output
            self._events += [OutputEvent(output)] if output.error is None else []
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if self._on_change is not None:
            self._on_change()


class StreamTable:
    """The streams of a deployment's requests; takes the events of its stages while there are any.

    A stage is called for its events while a request is streamed, one call after the other, each of
    which waits there for an event: nothing polls.
    """

    def __init__(self, stages: Sequence[RemoteStage | DiffusionEngine]):
        self._stages, self._lock = stages, threading.Lock()
        self._streams: dict[str, RequestStream] = {}
        self._taking: set[int] = set()

    def open(self, stream: RequestStream) -> None:
        """Begin to take events for a stream, before its request is submitted."""
        with self._lock:
            self._streams[stream.request_id] = stream
            idle = [number for number in range(len(self._stages)) if number not in self._taking]
            self._taking.update(idle)
        for number in idle:
            self._take(number)

    def put_rest(self, output: DiffusionOutput) -> None:
        """A stage is done with a request: the rest of its tokens."""
        if stream := self._streams.get(output.request_id):
            stream.put_rest(output)

    def end(self, output: DiffusionOutput) -> None:
        """A request has ended."""
        with self._lock:
            stream = self._streams.pop(output.request_id, None)
        if stream is not None:
            stream.end(output)

    def forget(self, request_id: str) -> None:
        """A request was not submitted."""
        with self._lock:
            self._streams.pop(request_id, None)

    def _take(self, number: int) -> None:
        try:
            coming = self._stages[number].take_events()
        except Exception:  # the stage is gone, and its requests end in errors
            self._taking.discard(number)
            return
        coming.add_done_callback(partial(self._on_events, number))

    def _on_events(self, number: int, coming: Future[list[Event]]) -> None:
        events: list[Event] = []
        if coming.exception() is None:
            events = coming.result()
        for event in events:
            if stream := self._streams.get(event.request_id):
                stream.put(event)
        with self._lock:  # a stage that is closed, or gone, has none
            goes_on = bool(events) and bool(self._streams)
            if not goes_on:
                self._taking.discard(number)
        if goes_on:
            self._take(number)


async def wait_for_output(
    coming: Future[DiffusionOutput], abort: Callable[[], None]
) -> DiffusionOutput:
    """Wait for an output; if the caller is cancelled, call `abort`."""
    try:
        return await asyncio.wrap_future(coming)
    except asyncio.CancelledError:
        abort()
        raise


async def events_of(open_stream: Callable[[], RequestStream]) -> AsyncGenerator[StreamEvent, None]:
    """The events of a stream; closes it when the iteration ends early, or is cancelled."""
    loop, changed, stream = asyncio.get_running_loop(), asyncio.Event(), open_stream()

    def on_change() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)

    stream.listen(on_change)
    try:
        while not stream.is_done:
            event = stream.take()
            if event is not None:
                yield event
                continue
            await changed.wait()
            changed.clear()
    finally:
        stream.close()
