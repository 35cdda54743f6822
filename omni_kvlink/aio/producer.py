"""`AsyncKVProducer`: a `KVProducer` for asyncio; copies run in threads."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from omni_kvlink.aio.end import AsyncLinkEnd, in_thread, run_in_thread
from omni_kvlink.link import AppendStream, KVProducer, PutStream, check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from omni_kvlink.connectors.protocol.transfer import Receipt


A = TypeVar("A")
P = ParamSpec("P")
S = TypeVar("S", PutStream, AppendStream)


class _AsyncWriter(Generic[S]):
    """Base of the streams for asyncio, which are opened, committed and left in threads.

    `out` is the synchronous stream below, once the block is entered. After a cancellation no copy
    writes any more: the end of the block waits for them, in a thread, too.
    """

    out: S

    def __init__(self, begin: Callable[[], S]):
        self._begin: Callable[[], S] = begin

    def __repr__(self) -> str:
        out = self.__dict__.get("out", "a stream that is not entered")
        return f"<{type(self).__name__} of {out!r}>"

    async def commit(self) -> Receipt:
        """Commit the stream in a thread; the end of the block does it, too."""
        return await asyncio.shield(run_in_thread(self.out.commit))

    async def __aenter__(self) -> Self:
        task = asyncio.ensure_future(run_in_thread(self._begin))
        try:
            self.out = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_fail)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: object
    ) -> None:
        await asyncio.shield(run_in_thread(partial(self.out.__exit__, kind, error, tb)))


class AsyncPutStream(_AsyncWriter[PutStream]):
    """A `PutStream` for asyncio.

    `async with producer.stream_put(plan) as out: await out.write_layer(0, key, value)`.
    """

    write_layer = in_thread("out", PutStream.write_layer)

    async def finish(self, extra: Mapping[str, Any] | None = None) -> Receipt:
        """`PutStream.finish`, in a thread."""
        return await asyncio.shield(run_in_thread(partial(self.out.finish, extra)))


class AsyncAppendStream(_AsyncWriter[AppendStream]):
    """An `AppendStream` for asyncio.

    `async with producer.open_stream("r", spec) as out: await out.append(tensors)`.
    A cancelled `append` fails the stream: whether its chunk was sent is not known.
    """

    append = in_thread("out", AppendStream.append)
    append_requests = in_thread("out", AppendStream.append_requests)


def opened_on_enter(
    kind: Callable[[Callable[[], S]], A], method: Callable[Concatenate[KVProducer, P], S]
) -> Callable[Concatenate[AsyncKVProducer, P], A]:
    """Return `method` for asyncio: the stream that it returns is opened by its `async with`."""

    @wraps(method)
    def call(self: AsyncKVProducer, /, *args: P.args, **kwargs: P.kwargs) -> A:
        return kind(partial(method, self.link, *args, **kwargs))

    return call


class AsyncKVProducer(AsyncLinkEnd[KVProducer]):
    """The methods of `KVProducer`, awaited; `link` is the synchronous producer below."""

    put = in_thread("link", KVProducer.put)
    put_many = in_thread("link", KVProducer.put_many)
    allocate = in_thread("link", KVProducer.allocate)
    stream_put = opened_on_enter(AsyncPutStream, KVProducer.stream_put)
    open_stream = opened_on_enter(AsyncAppendStream, KVProducer.open_stream)

    async def wait(self, receipt: Receipt, *, timeout: float) -> None:
        """`Receipt.wait`; holds no thread."""
        limit, loop = check_timeout(timeout), asyncio.get_running_loop()
        end = loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(end.cancel)  # set_result would raise after the wait

        receipt.add_done_callback(wake)
        try:
            await asyncio.wait([end], timeout=limit)
        finally:
            receipt.remove_done_callback(wake)
            end.cancel()
        receipt.check(waited=timeout)

    def withdraw(self, request_id: str) -> bool:
        """`KVProducer.withdraw`; does not block."""
        return self.link.withdraw(request_id)

    def fail(self, request_id: str, reason: str) -> None:
        """`KVProducer.fail`; does not block."""
        self.link.fail(request_id, reason)


def _fail(task: asyncio.Task[Any]) -> None:
    """Fail a stream whose task was cancelled before it got it."""
    if not task.cancelled() and task.exception() is None:
        task.result().fail("its writer was cancelled")
