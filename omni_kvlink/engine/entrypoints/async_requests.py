"""Requests of `OmniDiffusion` for asyncio: waiting holds no thread, cancelling aborts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from concurrent.futures import Future

    from omni_kvlink.engine.entrypoints.streams import RequestStream, StreamEvent
    from omni_kvlink.engine.outputs import DiffusionOutput


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
