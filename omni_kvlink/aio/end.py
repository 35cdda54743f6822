"""`AsyncLinkEnd`, what both ends of a link share for asyncio; `in_thread`, methods in threads."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import Future
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from omni_kvlink.copier import CurrentStreams
from omni_kvlink.link import KVConsumer, KVProducer
from omni_kvlink.system.threads import start_detached

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from typing_extensions import Self

P = ParamSpec("P")
T = TypeVar("T")
Link = TypeVar("Link", bound=KVProducer | KVConsumer)


def run_in_thread(call: Callable[[], T]) -> Coroutine[Any, Any, T]:
    """Await a call that blocks, in a thread of its own, with the caller's CUDA streams.

    Not in the event loop's pool: calls that wait there would keep its few threads from others, and
    hold up the end of the process. If the task is cancelled, the call goes on.

    The streams are those at the call of this function: the coroutine may begin to run later.
    """
    return _in_thread(partial(CurrentStreams().call, call))


async def _in_thread(call: Callable[[], T]) -> T:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # then a cancelled task cannot cancel it
    run = partial(contextvars.copy_context().run, _complete, future, call)
    start_detached(run)
    try:
        return await asyncio.wrap_future(future)
    finally:
        del future, run  # the error's traceback has this frame


def _complete(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, call  # the error's traceback has this frame


def in_thread(
    attribute: str, method: Callable[Concatenate[Any, P], T]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method of the object that `self.<attribute>` is, as a coroutine that runs in a thread."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        bound_method: Callable[P, T] = getattr(getattr(self, attribute), method.__name__)
        return run_in_thread(partial(bound_method, *args, **kwargs))

    return call


class AsyncLinkEnd(Generic[Link]):
    """The methods of both `KVProducer` and `KVConsumer`, awaited where they block."""

    def __init__(self, link: Link):
        self.link = link

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.link!r}>"

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        """`abort` of the link below; does not block."""
        self.link.abort(request_id, reason)

    def stats(self) -> dict[str, Any]:
        """`stats` of the link below."""
        return self.link.stats()

    close = in_thread("link", KVProducer.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
