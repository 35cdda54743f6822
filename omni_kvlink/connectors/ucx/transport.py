"""`UcxTransport`: payload bytes between processes, from one memory into the other, by UCX."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from omni_kvlink.connectors.runtime.event_loop import READ, EventLoop
from omni_kvlink.connectors.ucx.address import seal, unseal
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.connectors.ucx.worker import UcxArrived, UcxWorker
from omni_kvlink.errors import ClosedError, PeerLostError, WireError

Done = Callable[[BaseException | None], None]

_GRACE = 0.5  # seconds that `close` gives peers to end what is on its way
_PATIENCE = 1.0  # and then UCX, to cancel it


class UcxEndpoint:
    """A peer that a plane was connected to."""

    __slots__ = ("error", "handle")

    def __init__(self) -> None:
        self.handle: Any = None
        self.error: Exception | None = None

    @property
    def alive(self) -> bool:
        """False from the moment that the plane knows of its end."""
        return self.error is None


class UcxRequest:
    """One message on its way; `memory` is referenced until UCX has let go of it."""

    __slots__ = ("_done", "array", "endpoint", "handle", "memory", "tag")

    def __init__(self, endpoint: UcxEndpoint, memory: object, array: Any, tag: int, done: Done):
        self.endpoint, self.memory, self.array, self.tag = endpoint, memory, array, tag
        self.handle: Any = None
        self._done: Done | None = done

    @property
    def is_over(self) -> bool:
        """Whether `done` was called."""
        return self._done is None

    def finish(self, error: BaseException | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(error)

    def let_go(self) -> None:
        self.memory = self.array = self.handle = None


class UcxTransport:
    """One end of a link: sends and receives messages of exactly known length.

    It has one thread, which sleeps until UCX or a caller needs it; every call returns at once and
    may come from any thread. `done(error)` is called once for each request, in the plane's thread;
    it must not block or raise.

    A receive is known to the plane alone until its message has come: only if tag and length are
    right does UCX learn of the memory. A message that nobody waits for is thrown away and counted,
    so **receive first, then ask the peer to send**. What is written into memory is therefore
    always what was asked for, and a receive that is given up early costs nothing.

    Memory that UCX may still write to, or read from, after its request was given up is
    *quarantined*: referenced and counted until UCX says that it is done. Who must know when it is
    free puts a finalizer on it, as on any region's span.

    Raises:
        UnavailableError: UCX has none of these transports or devices.
    """

    def __init__(self, settings: UcxSettings | None = None):
        self.settings = settings or UcxSettings()
        self._endpoints: set[UcxEndpoint] = set()
        self._ending: set[UcxEndpoint] = set()  # lost or disconnected, and not yet closed
        self._waiting: dict[int, UcxRequest] = {}  # by tag: receives whose message has not come
        self._active: set[UcxRequest] = set()  # UCX has their memory
        self._discards: set[Any] = set()
        self._counts = dict.fromkeys(("finished", "failed", "stale", "lost"), 0)
        self._closed = False
        self._lock = threading.Lock()  # of `_closed`: no call slips in behind the last one
        self._pid = os.getpid()
        self._worker: UcxWorker | None = None
        opened: Future[tuple[bytes, dict[str, Any]]] = Future()
        self._loop = EventLoop("kvlink-ucx", self._tick, self._crashed)
        self._loop.call(lambda: self._open(opened))
        try:
            self.address, self._facts = opened.result()
        except BaseException:
            self._loop.stop()
            raise

    def connect(self, address: bytes) -> UcxEndpoint:
        """A handle at once; whether the peer is there shows in the requests.

        Raises:
            WireError: this is no plane's address.
        """
        worker, endpoint = unseal(address), UcxEndpoint()
        self._call(lambda: self._connect(endpoint, worker))
        return endpoint

    def disconnect(self, endpoint: UcxEndpoint) -> None:
        """End it at once: its requests fail; memory that UCX has is quarantined.

        Such memory is free when the peer has answered or is gone, or when the plane is closed.
        """
        self._call(lambda: self._on_peer_lost(endpoint, PeerLostError("disconnected here")))

    def send(self, endpoint: UcxEndpoint, memory: object, tag: int, done: Done) -> UcxRequest:
        """Send all bytes of `memory` as one message.

        `done(None)` says that the memory is the caller's again, not that the peer has the bytes;
        `done(PeerLostError)` that the peer is gone.
        """
        request = self._request(endpoint, memory, tag, done)
        self._call(lambda: self._send(request))
        return request

    def receive(self, endpoint: UcxEndpoint, memory: object, tag: int, done: Done) -> UcxRequest:
        """Fill `memory` with the message of this tag, which must be exactly as long.

        `done(None)` says that every byte is there; `done(WireError)` that the message had another
        length (nothing was written), or that a receive of this tag is already waiting;
        `done(PeerLostError)` that the endpoint's peer is gone.
        """
        request = self._request(endpoint, memory, tag, done)
        self._call(lambda: self._receive(request))
        return request

    def abandon(self, request: UcxRequest) -> None:
        """Wait no longer: `done(TimeoutError)`, unless it was called before."""
        self._call(lambda: self._abandon(request))

    @property
    def has_cuda(self) -> bool:
        """Whether UCX takes memory of a GPU."""
        return bool(self._facts["cuda"])

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the plane's own thread."""
        return self._loop.is_own_thread

    def stats(self) -> dict[str, Any]:
        """What UCX uses, and counts of requests, messages and quarantined bytes, as JSON values."""
        active = list(self._active)
        quarantined = [request.array for request in active if request.is_over]
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
        """Fail what is on its way with ClosedError, let go of everything, end the thread.

        Takes 0.5 s longer than nothing if a peer does not answer. ucxx 0.52 does not free its
        worker if such a peer was being sent to: its descriptors stay until the process ends.
        """
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._loop.call(self._shut)
        self._loop.stop()

    # ---- any thread

    def _request(self, endpoint: UcxEndpoint, memory: object, tag: int, done: Done) -> UcxRequest:
        worker = self._worker
        if worker is None:
            raise ClosedError("the UCX plane is closed")
        return UcxRequest(endpoint, memory, worker.array(memory), tag, done)

    def _call(self, function: Callable[[], None]) -> None:
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                raise ClosedError("the UCX plane is closed")
            self._loop.call(function)

    # ---- the plane's thread

    def _open(self, opened: Future[tuple[bytes, dict[str, Any]]]) -> None:
        try:
            worker = self._worker = UcxWorker(self.settings)
        except BaseException as error:
            opened.set_exception(error)
        else:
            self._loop.watch(worker.fd, READ, lambda events: None)  # the tick does the work
            opened.set_result((seal(worker.address), worker.facts()))

    def _connect(self, endpoint: UcxEndpoint, address: bytes) -> None:
        try:
            endpoint.handle = self._must().connect(address)
        except PeerLostError as error:
            endpoint.error = error
        else:
            self._endpoints.add(endpoint)

    def _send(self, request: UcxRequest) -> None:
        if request.endpoint.error is not None:
            self._fail(request, request.endpoint.error)
        else:
            worker = self._must()
            self._post(
                request, lambda: worker.send(request.endpoint.handle, request.array, request.tag)
            )

    def _receive(self, request: UcxRequest) -> None:
        if request.endpoint.error is not None:
            self._fail(request, request.endpoint.error)
        elif request.tag in self._waiting:
            self._fail(request, WireError(f"tag {request.tag:#x} is already waited for"))
        else:
            self._waiting[request.tag] = request

    def _post(self, request: UcxRequest, post: Callable[[], Any]) -> None:
        try:
            request.handle = post()
        except PeerLostError as error:
            self._fail(request, error)
        else:
            self._active.add(request)

    def _abandon(self, request: UcxRequest) -> None:
        if not request.is_over:
            self._fail(request, TimeoutError("the request was abandoned"))

    def _fail(self, request: UcxRequest, error: BaseException) -> None:
        """Tell its caller; its memory stays if UCX has it."""
        if self._waiting.get(request.tag) is request:
            del self._waiting[request.tag]
        if request not in self._active:
            request.let_go()
        self._counts["failed"] += not request.is_over
        request.finish(error)

    def _tick(self, now: float) -> float:
        """Everything that can be done now; then sleep, unless UCX has more."""
        if self._worker is None:
            return float("inf")
        self._worker.progress()
        self._loop.catch_up()  # a receive, whose message may be among what just came
        worker = self._worker
        if worker is None:
            return float("inf")
        posted = self._match(worker)
        self._harvest(worker)
        self._add_tombstone(worker)
        return now if posted or not worker.arm() else float("inf")

    def _match(self, worker: UcxWorker) -> bool:
        """Give each message that came to the receive that waits for it; whether there were any."""
        posted = False
        while (message := worker.arrived()) is not None:
            posted = True
            request = self._waiting.pop(message.tag, None)
            if request is None:
                self._counts["stale"] += 1
            elif message.nbytes != request.array.nbytes:
                wrong = f"a message of {message.nbytes} bytes for {request.array.nbytes}"
                self._fail(request, WireError(wrong))
                request = None
            self._take(worker, request, message)
        return posted

    def _take(self, worker: UcxWorker, request: UcxRequest | None, message: UcxArrived) -> None:
        if request is None:
            self._discards.add(worker.discard(message))
        else:
            endpoint, array = request.endpoint.handle, request.array
            self._post(request, lambda: worker.receive(endpoint, array, message))

    def _harvest(self, worker: UcxWorker) -> None:
        """Finish what UCX has completed."""
        if self._discards:
            self._discards = {handle for handle in self._discards if not handle.completed}
        for request in [request for request in self._active if request.handle.completed]:
            self._active.discard(request)
            error = worker.error(request.handle)
            request.let_go()
            if error is not None:
                self._fail(request, PeerLostError(f"UCX: {error}"))
            elif not request.is_over:
                self._counts["finished"] += 1
                request.finish(None)

    def _add_tombstone(self, worker: UcxWorker) -> None:
        """Close the endpoints that are over and that UCX has no memory for.

        Not earlier: UCX calls a receive whose endpoint is closed cancelled, and then writes what
        the peer still sends to it.
        """
        for endpoint in [endpoint for endpoint in self._endpoints if not endpoint.handle.alive]:
            self._counts["lost"] += 1
            self._on_peer_lost(endpoint, PeerLostError("the UCX peer is gone"))
        if self._ending:
            busy = {request.endpoint for request in self._active}
            for endpoint in self._ending - busy:
                self._ending.remove(endpoint)
                worker.disconnect(endpoint.handle)
                endpoint.handle = None

    def _on_peer_lost(self, endpoint: UcxEndpoint, error: Exception) -> None:
        """End an endpoint and fail all its requests."""
        if endpoint.error is not None:
            return
        endpoint.error = error
        self._endpoints.discard(endpoint)
        self._ending.add(endpoint)
        for request in [*self._waiting.values(), *self._active]:
            if request.endpoint is endpoint:
                self._fail(request, error)

    def _must(self) -> UcxWorker:
        assert self._worker is not None
        return self._worker

    def _crashed(self, error: BaseException) -> None:
        with self._lock:
            self._closed = True
        self._shut()

    def _drain(self, worker: UcxWorker, seconds: float) -> None:
        """Wait until UCX has let go of everything, but not longer than this."""
        until = time.monotonic() + seconds
        while (self._active or self._discards) and (left := until - time.monotonic()) > 0:
            worker.progress()
            posted = self._match(worker)
            self._harvest(worker)
            if not posted and worker.arm():
                select.select([worker.fd], [], [], left if self._active else 0)

    def _shut(self) -> None:
        """The last thing that the thread does with UCX."""
        worker, error = self._worker, ClosedError("the UCX plane was closed")
        if worker is None:
            return
        for request in [*self._waiting.values(), *self._active]:
            self._fail(request, error)
        self._drain(worker, _GRACE)
        memory = [request.array for request in self._active]
        for endpoint in [*self._endpoints, *self._ending]:
            endpoint.error = endpoint.error or error
            worker.disconnect(endpoint.handle)
            endpoint.handle = None
        self._drain(worker, _PATIENCE)
        self._loop.unwatch(worker.fd)
        self._endpoints.clear()
        self._ending.clear()
        self._discards.clear()
        for request in self._active:
            request.handle = None
        self._worker = worker = None
        memory.clear()  # now that UCX itself is gone: it writes also to what it called cancelled
        for request in self._active:
            request.let_go()
        self._active.clear()
