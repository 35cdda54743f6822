"""`InlineReceiver`: receives a get's small payload in the get's own thread, not in the loop's."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.get_table import Delivery, GetLease
from omni_kvlink.connectors.protocol.messages import Offer, Status, decode
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.errors import ClosedError, VersionError, WireError
from omni_kvlink.memory.ownership import CallAtEnd, closer
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.digests import verify

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    import zmq

    from omni_kvlink.connectors.base import InlineTarget
    from omni_kvlink.connectors.control.monitored_socket import MonitoredSocket
    from omni_kvlink.connectors.protocol.get_table import GetState, GetTable
    from omni_kvlink.connectors.protocol.messages import Message
    from omni_kvlink.connectors.runtime.event_loop import EventLoop
    from omni_kvlink.connectors.runtime.receive_pool import ReceivePool
    from omni_kvlink.connectors.runtime.remote_consumer import RemoteGet
    from omni_kvlink.payload.layouts import LayoutCache
    from omni_kvlink.payload.manifest import Manifest

_MAX_POLL = 86_400_000  # milliseconds; poll counts them in an int


class Wake:
    """A descriptor that is readable after `set`; closed when nobody has this object any more."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        CallAtEnd.of(self, closer(self.fd))

    def set(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Undo `set`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class InlineReceiver:
    """Receives a payload that comes inside its offer in the thread whose get waits for it.

    It takes that payload only, and only if it is as committed. Any other message stays in the
    socket for the loop, whose thread would otherwise receive all of them and wake the get. One
    thread at a time; a get that comes meanwhile waits for the loop.

    A payload is charged to the quota of `receive_pool` until its `Release`.
    """

    def __init__(
        self,
        loop: EventLoop,
        get_table: GetTable,
        receive_pool: ReceivePool,
        layouts: LayoutCache,
        counters: Counter[str],
    ):
        self._loop, self._get_table, self._receive_pool = loop, get_table, receive_pool
        self._layouts, self._counters = layouts, counters
        # Released by its owner alone, so that an interrupt just after `acquire` leaves it free.
        self._receiving = threading.RLock()
        self._receiver = 0  # the thread that has it
        self._wake: Wake | None = None  # set when another thread has answered the get

    def receive(self, socket: MonitoredSocket, get: RemoteGet, deadline: float) -> None:
        """Block until `get.delivery` is there or the get has ended, to the `deadline` at most.

        It may return earlier, and leave the get to the loop.
        """
        try:
            if self._receiving.acquire(blocking=False):
                self._receiver = threading.get_ident()
                self._receive(socket, get, deadline)
        finally:
            try:
                self._stop(socket)
            except BaseException:  # an interrupt: without this nobody would receive
                self._stop(socket)
                socket.resume()
                raise

    def close(self) -> None:
        """Free the descriptor once no thread uses it; called when the socket is closed."""
        self._wake = None

    def _receive(self, socket: MonitoredSocket, get: RemoteGet, deadline: float) -> None:
        with contextlib.suppress(OSError):  # no descriptor is left
            self._wake = self._wake or Wake()
        wake, answer = self._wake, get.get_state.answer
        if wake is None or not socket.pause():
            self._wake = None
            return
        poll = select.poll()
        poll.register(socket.fd, select.POLLIN)
        poll.register(wake.fd, select.POLLIN)
        answer.add_done_callback(partial(self._on_answer, wake))
        if get.inline_target is not None and get.session.has_inline:
            get.inline_target.open()
        while not answer.is_set() and self._take_next(socket, get):
            left = deadline - time.monotonic()
            if left <= 0 or not (ready := poll.poll(min(1e3 * left + 1, _MAX_POLL))):
                return
            if (wake.fd, select.POLLIN) in ready:
                wake.clear()

    def _take_next(self, socket: MonitoredSocket, get: RemoteGet) -> bool:
        """Take the payload if it has come; return whether to wait on, since no message has.

        An interrupt at any line loses nothing: a message is taken away at last, and to handle it
        twice changes nothing.
        """
        with socket.lock:
            frames = socket.peek()
            message = _decoded(frames)
            if isinstance(message, Status) and len(frames) == 1:
                self._get_table.on_message(message)
                socket.skip()
                frames = socket.peek()
                message = _decoded(frames)
            if isinstance(message, Offer) and _is_whole(message, frames, get.get_state):
                try:
                    self._take(message, frames[1].buffer, get)
                except BaseException:  # an interrupt: the loop takes it, or ends the connection
                    if get.get_state.offer is not message:
                        owner = self._get_table, message.get_id
                        self._loop.call(partial(self._receive_pool.free_share, owner))
                    raise
            if get.delivery is not None:
                socket.skip()
        if get.delivery is not None:
            get.future.set_result(None)
            get.get_state.settle()
        return not frames

    def _take(self, offer: Offer, payload: memoryview, get: RemoteGet) -> None:
        """Answer the get with the payload, unless it is damaged or there is no room for it."""
        get_state, owner, has_room = get.get_state, (self._get_table, offer.get_id), False
        if fault_points.enabled:
            fault_points.point("get.offered")
        with contextlib.suppress(ClosedError):
            has_room = self._receive_pool.share(owner, payload.nbytes)
        if not has_room:
            return  # the loop waits for room
        opened = _open(payload, get_state, get.inline_target, self._layouts)
        if opened is None:  # the loop fetches again what is wrong
            self._loop.call(partial(self._receive_pool.free_share, owner))
            return
        region, manifest, is_verified = opened
        if fault_points.enabled:
            fault_points.point("fetch.chunk")
        self._get_table.on_message(offer)
        if get_state.offer is not offer:  # it was ended meanwhile, and the payload released unread
            if get.inline_target is not None:
                get.inline_target.discard()
            return
        if fault_points.enabled:
            fault_points.point("get.mapped")
        get.session.has_inline = True
        self._counters["verified" if is_verified else "unverified"] += 1
        lease = GetLease(self._get_table, offer.get_id, offer.epoch)
        get.delivery = Delivery(
            get.key, region, lease, manifest=manifest, copies=1, is_verified=is_verified
        )

    def _on_answer(self, wake: Wake, answer: object) -> None:
        """Wake the thread that receives: another one has ended its get."""
        if self._receiver not in (0, threading.get_ident()):
            wake.set()

    def _stop(self, socket: MonitoredSocket) -> None:
        """Leave the socket to the loop, if this thread receives."""
        if self._receiver == threading.get_ident():
            self._receiver = 0
        is_released = False
        with contextlib.suppress(RuntimeError):  # another thread receives
            self._receiving.release()
            is_released = True
        if is_released:
            socket.resume()


def _decoded(frames: Sequence[zmq.Frame]) -> Message | None:
    """The message of these frames; None if there is none, or it is damaged."""
    message: Message | None = None
    with contextlib.suppress(WireError, IndexError):
        message = decode(frames[0].bytes)
    return message


def _is_whole(offer: Offer, frames: Sequence[zmq.Frame], get_state: GetState) -> bool:
    """Whether a whole payload for this get comes with its offer."""
    if offer.get_id != get_state.get_id or get_state.streamed or offer.draft or len(frames) != 2:
        return False
    return offer.location.nbytes == len(frames[1]) > 0


def _open(
    payload: memoryview, get_state: GetState, target: InlineTarget | None, layouts: LayoutCache
) -> tuple[Region, Manifest | None, bool] | None:
    """Memory with the payload, its manifest if it was decoded, and whether each byte was compared.

    None if it is not as committed.
    """
    if target is not None:
        region = target.fill(payload, verify=get_state.verify)
        if region is not None:
            return region, None, get_state.verify and target.is_covered
    region = Region.copy_of(payload)
    if not get_state.verify:
        return region, None, False
    manifest: Manifest | None = None
    with contextlib.suppress(WireError, VersionError):
        decoded = layouts.decode(payload)
        verify(decoded, region)
        manifest = decoded
    return None if manifest is None else (region, manifest, manifest.is_covered)
