"""`UcxTransport`: messages of known length from one process's memory into another's, by UCX."""

from __future__ import annotations

import dataclasses
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from omni_kvlink._native import cuda_context
from omni_kvlink.connectors.runtime.event_loop import READ, EventLoop
from omni_kvlink.connectors.ucx.addressing import seal, unseal
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.connectors.ucx.worker import UcxWorker
from omni_kvlink.errors import (
    ClosedError,
    NativeError,
    PeerLostError,
    WireError,
    without_frames,
)
from omni_kvlink.memory.region import Region
from omni_kvlink.system import process
from omni_kvlink.system.waits import MAX_TIMEOUT, Answer

DoneCallback = Callable[[BaseException | None], None]

_CLOSE_TIMEOUT = 0.5
"""Seconds that `close` waits for peers to complete requests."""
_CANCEL_TIMEOUT = 1.0
"""Seconds that it then waits for UCX to cancel them."""


@dataclasses.dataclass(slots=True, eq=False)
class UcxEndpoint:
    """A peer that a transport was connected to; `error` says why the connection ended."""

    handle: Any = None  # ucxx's endpoint
    error: Exception | None = None


@dataclasses.dataclass(slots=True, eq=False)
class UcxRequest:
    """One message on its way; `memory` is referenced until UCX no longer uses it."""

    endpoint: UcxEndpoint
    memory: object
    array: Any
    tag: int
    done: DoneCallback | None  # None once it was called
    handle: Any = None  # ucxx's request

    def complete(self, error: BaseException | None) -> None:
        """Call `done`, unless it was called before."""
        done, self.done = self.done, None
        if done is not None:
            done(error)

    def release(self) -> None:
        """Drop the references to the memory."""
        self.memory = self.array = self.handle = None


class UcxTransport:
    """One end of any number of UCX connections, with a thread of its own.

    The thread sleeps until UCX or a caller needs it. All methods but `close` return at once and
    may be called in any thread. `done(error)` is called once for each request, in the transport's
    thread; it must not block or raise.

    UCX learns of a receive's memory only when a message with its tag and length has arrived. A
    message without a receive is discarded and counted, so **post the receive before the peer
    sends**. What is written into memory is therefore always what was requested, and cancelling a
    receive before its message arrives costs nothing.

    Memory that UCX may still access after its request was cancelled or failed is *quarantined*:
    referenced and counted until UCX has completed the request. To learn when it is free, put a
    finalizer on the memory, as on any region's span.

    `device` is the one that most memory is on, such as "cuda:0"; if "", what the caller uses now.
    """

    def __init__(self, settings: UcxSettings | None = None, *, device: str = ""):
        self.settings = settings or UcxSettings()
        self._endpoints: set[UcxEndpoint] = set()
        self._closing: set[UcxEndpoint] = set()  # lost or disconnected, not yet closed in UCX
        self._waiting: dict[int, UcxRequest] = {}  # by tag: receives whose message has not arrived
        self._active: set[UcxRequest] = set()  # requests whose memory UCX has
        self._discards: set[Any] = set()
        self._connecting: dict[UcxEndpoint, int] = {}  # until a request is done: rounds since
        self._counts = dict.fromkeys(("finished", "failed", "stale", "lost"), 0)
        self._closed = False
        self._lock = threading.Lock()  # guards `_closed`: no call is queued behind the last one
        process.close_in_children(self)
        self._worker: UcxWorker | None = None
        self._device = device or "cpu"  # the last one whose context became the thread's
        self._context = cuda_context.current() if "cuda" in self.settings.transports else 0
        opened: Answer[tuple[bytes, dict[str, Any]]] = Answer()
        self._loop = EventLoop("kvlink-ucx", self._tick_in_loop, self._crashed_in_loop)
        self._loop.call(lambda: self._open_in_loop(opened))
        try:
            opened.wait(MAX_TIMEOUT)
            self.address, self._facts = opened.result()
        except BaseException:
            self._loop.close()
            raise

    def connect(self, address: bytes) -> UcxEndpoint:
        """Return an endpoint at once; an unreachable peer shows in the requests.

        Raises WireError if it is no address that this side can use; see `unseal`.
        """
        expected = self.address if self.settings.transports == "tcp" else self.address[:9]
        worker, endpoint = unseal(address, expected), UcxEndpoint()
        self._call(lambda: self._connect_in_loop(endpoint, worker))
        return endpoint

    def disconnect(self, endpoint: UcxEndpoint) -> None:
        """Fail all requests of an endpoint, and quarantine the memory that UCX has of them.

        The memory is free when the peer has answered or is gone, or when the transport is closed.
        """
        self._call(lambda: self._on_peer_lost_in_loop(endpoint, PeerLostError("disconnected here")))

    def send(
        self, endpoint: UcxEndpoint, memory: object, tag: int, done: DoneCallback
    ) -> UcxRequest:
        """Send all bytes of `memory` as one message.

        `done(None)` means that the memory may be reused, not that the peer has the bytes;
        `done(PeerLostError)` that the peer is gone.
        """
        request = self._request(endpoint, memory, tag, done)
        self._call(lambda: self._send_in_loop(request))
        return request

    def receive(
        self, endpoint: UcxEndpoint, memory: object, tag: int, done: DoneCallback
    ) -> UcxRequest:
        """Fill `memory` with the message of this tag, which must have exactly its length.

        `done(None)` means that every byte has arrived; `done(WireError)` that the message had
        another length (nothing was written), or that a receive with this tag is already posted;
        `done(PeerLostError)` that the peer is gone.
        """
        request = self._request(endpoint, memory, tag, done)
        self._call(lambda: self._receive_in_loop(request))
        return request

    def cancel(self, request: UcxRequest) -> None:
        """Complete a request with `done(TimeoutError)`, unless it is done."""
        self._call(lambda: self._cancel_in_loop(request))

    @property
    def has_cuda(self) -> bool:
        """Whether UCX can access GPU memory."""
        return bool(self._facts["cuda"])

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the transport's own thread."""
        return self._loop.is_own_thread

    def stats(self) -> dict[str, Any]:
        """Return what UCX uses, and counts of requests, messages and quarantined bytes (JSON)."""
        active = list(self._active)
        quarantined = [request.array for request in active if request.done is None]
        return {
            **self._facts,
            "transports": self.settings.transports,
            "endpoints": len(self._endpoints),
            "waiting": len(self._waiting),
            "active": len(active) - len(quarantined),
            "quarantined": len(quarantined),
            "quarantined_nbytes": sum(array.nbytes for array in quarantined if array is not None),
            **self._counts,
        }

    def close(self) -> None:
        """Fail all requests with ClosedError, free all memory, and end the thread.

        Blocks up to 1.5 s if a peer does not answer. ucxx 0.52 does not free its worker if such a
        peer was being sent to: its descriptors stay open until the process ends.
        """
        if self._closed:
            return  # in a forked child, too
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call(self._close_worker_in_loop)
        self._loop.close()

    def _request(
        self, endpoint: UcxEndpoint, memory: object, tag: int, done: DoneCallback
    ) -> UcxRequest:
        worker = self._worker
        if worker is None:
            raise ClosedError("the UCX transport is closed")
        return UcxRequest(endpoint, memory, worker.array(memory), tag, done)

    def _call(self, function: Callable[[], None]) -> None:
        self._check_open()
        with self._lock:
            self._check_open()
            self._loop.call(function)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the UCX transport is closed")

    def _open_in_loop(self, opened: Answer[tuple[bytes, dict[str, Any]]]) -> None:
        try:
            # UCX looks for devices in its thread's context.
            if self._device == "cpu":
                cuda_context.use(self._context)
            else:
                cuda_context.use_device(int(self._device.partition(":")[2]))
            worker = self._worker = UcxWorker(self.settings)
        except BaseException as error:
            opened.set_error(error)  # type: ignore[arg-type]  # it is raised alike
        else:
            worker.set_close_on_exec()
            self._loop.watch(worker.fd, READ, lambda events: None)  # `_tick` does the work
            opened.set_result((seal(worker.address), worker.facts()))

    def _connect_in_loop(self, endpoint: UcxEndpoint, address: bytes) -> None:
        try:
            endpoint.handle = self._open_worker().connect(address)
        except PeerLostError as error:
            endpoint.error = without_frames(error)
        else:
            self._endpoints.add(endpoint)
            self._connecting[endpoint] = 0

    def _send_in_loop(self, request: UcxRequest) -> None:
        if request.endpoint.error is not None:
            self._fail_in_loop(request, request.endpoint.error)
        else:
            self._post_in_loop(request, self._open_worker().send, request.tag)

    def _receive_in_loop(self, request: UcxRequest) -> None:
        if request.endpoint.error is not None:
            self._fail_in_loop(request, request.endpoint.error)
        elif request.tag in self._waiting:
            self._fail_in_loop(
                request, WireError(f"a receive of tag {request.tag:#x} is already posted")
            )
        else:
            self._waiting[request.tag] = request

    def _post_in_loop(self, request: UcxRequest, post: Callable[..., Any], target: object) -> None:
        try:
            self._use_device_of_in_loop(request.memory)
            request.handle = post(request.endpoint.handle, request.array, target)
        except (PeerLostError, NativeError) as error:
            self._fail_in_loop(request, error)
        else:
            self._active.add(request)

    def _use_device_of_in_loop(self, memory: object) -> None:
        """Make the context of GPU memory the thread's: UCX copies in its thread's context."""
        device = memory.device if isinstance(memory, Region) else "cpu"
        if device not in ("cpu", self._device):
            cuda_context.use_device(int(device.partition(":")[2]))
            self._device = device

    def _cancel_in_loop(self, request: UcxRequest) -> None:
        if request.done is not None:
            self._fail_in_loop(request, TimeoutError("the request was cancelled"))

    def _fail_in_loop(self, request: UcxRequest, error: BaseException) -> None:
        """Complete a request with an error; keep its memory if UCX has it."""
        if self._waiting.get(request.tag) is request:
            del self._waiting[request.tag]
        if request not in self._active:
            request.release()
        self._counts["failed"] += request.done is not None
        request.complete(error)

    def _tick_in_loop(self, now: float) -> float:
        """Do everything that can be done now; return when to run again."""
        if self._worker is None:
            return float("inf")
        self._worker.progress()
        self._loop.run_pending()  # a receive whose message may be among those that just arrived
        worker = self._worker
        if worker is None:
            return float("inf")
        posted = self._match_in_loop(worker)
        self._guard_descriptors_in_loop(worker)
        self._complete_requests_in_loop(worker)
        self._close_endpoints_in_loop(worker)
        return now if posted or not worker.arm() else float("inf")

    def _guard_descriptors_in_loop(self, worker: UcxWorker) -> None:
        """Make new connections close-on-exec.

        UCX does not tell when it opens one: after a connect it is looked for in rounds 1, 2, 4, 8
        and so on, and at last before the first request is reported as done.
        """
        if not self._connecting:
            return
        done = {request.endpoint for request in self._active if request.handle.completed}
        rounds = {endpoint: number + 1 for endpoint, number in self._connecting.items()}
        if done & rounds.keys() or any(number & (number - 1) == 0 for number in rounds.values()):
            done &= rounds.keys() if worker.set_close_on_exec() else set()
        self._connecting = {peer: number for peer, number in rounds.items() if peer not in done}

    def _match_in_loop(self, worker: UcxWorker) -> bool:
        """Give each arrived message to the receive with its tag; return whether there were any."""
        posted = False
        while (message := worker.probe()) is not None:
            posted = True
            request = self._waiting.pop(message.tag, None)
            if request is None:
                self._counts["stale"] += 1
            elif message.nbytes != request.array.nbytes:
                wrong = f"a message of {message.nbytes} bytes for {request.array.nbytes}"
                self._fail_in_loop(request, WireError(wrong))
            else:
                self._post_in_loop(request, worker.receive, message)
                continue
            self._discards.add(worker.discard(message))
        return posted

    def _complete_requests_in_loop(self, worker: UcxWorker) -> None:
        """Complete the requests that UCX has completed."""
        if self._discards:
            self._discards = {handle for handle in self._discards if not handle.completed}
        for request in [request for request in self._active if request.handle.completed]:
            self._active.discard(request)
            error = worker.error(request.handle)
            request.release()
            if error is not None:
                self._fail_in_loop(request, PeerLostError(f"UCX: {error}"))
            elif request.done is not None:
                self._counts["finished"] += 1
                request.complete(None)

    def _close_endpoints_in_loop(self, worker: UcxWorker) -> None:
        """Close the lost endpoints that UCX has no memory for.

        Not earlier: UCX reports a receive whose endpoint is closed as cancelled, and then still
        writes what the peer sends to it.
        """
        for endpoint in [endpoint for endpoint in self._endpoints if not endpoint.handle.alive]:
            self._counts["lost"] += 1
            self._on_peer_lost_in_loop(endpoint, PeerLostError("the UCX peer is gone"))
        if self._closing:
            busy = {request.endpoint for request in self._active}
            for endpoint in self._closing - busy:
                self._closing.remove(endpoint)
                worker.disconnect(endpoint.handle)
                endpoint.handle = None

    def _on_peer_lost_in_loop(self, endpoint: UcxEndpoint, error: Exception) -> None:
        """Fail all requests of an endpoint."""
        if endpoint.error is not None:
            return
        endpoint.error = without_frames(error)
        self._connecting.pop(endpoint, None)
        self._endpoints.discard(endpoint)
        self._closing.add(endpoint)
        for request in [*self._waiting.values(), *self._active]:
            if request.endpoint is endpoint:
                self._fail_in_loop(request, error)

    def _open_worker(self) -> UcxWorker:
        assert self._worker is not None
        return self._worker

    def _crashed_in_loop(self, error: BaseException) -> None:
        with self._lock:
            self._closed = True
        self._close_worker_in_loop()

    def _drain_in_loop(self, worker: UcxWorker, seconds: float) -> None:
        """Wait until UCX has completed all requests, but not longer than this."""
        deadline = time.monotonic() + seconds
        while (self._active or self._discards) and (seconds := deadline - time.monotonic()) > 0:
            worker.progress()
            posted = self._match_in_loop(worker)
            self._complete_requests_in_loop(worker)
            if not posted and worker.arm():
                select.select([worker.fd], [], [], seconds if self._active else 0)

    def _close_worker_in_loop(self) -> None:
        worker, error = self._worker, ClosedError("the UCX transport was closed")
        if worker is None:
            return
        for request in [*self._waiting.values(), *self._active]:
            self._fail_in_loop(request, error)
        self._drain_in_loop(worker, _CLOSE_TIMEOUT)
        memory = [request.array for request in self._active]
        for endpoint in [*self._endpoints, *self._closing]:
            endpoint.error = endpoint.error or error
            worker.disconnect(endpoint.handle)
            endpoint.handle = None
        self._drain_in_loop(worker, _CANCEL_TIMEOUT)
        self._loop.unwatch(worker.fd)
        self._endpoints.clear()
        self._closing.clear()
        self._discards.clear()
        for request in self._active:
            request.handle = None
        self._worker = worker = None
        memory.clear()  # only now: UCX also writes to memory of requests that it calls cancelled
        for request in self._active:
            request.release()
        self._active.clear()
