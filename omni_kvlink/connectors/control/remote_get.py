"""A get over the control channel; its thread may receive a small payload itself."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.answer import MAX_TIMEOUT, check_timeout
from omni_kvlink.connectors.protocol.delivery import Delivery
from omni_kvlink.connectors.protocol.get_table import GetLease
from omni_kvlink.connectors.protocol.messages import Offer, Status, decode
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.connectors.runtime.consumer import SessionGet
from omni_kvlink.connectors.runtime.event_loop import LeadingReceiver, Wake
from omni_kvlink.connectors.runtime.inbound_transfer import InboundTransfer
from omni_kvlink.errors import ClosedError, KVLinkError, VersionError, WireError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.digests import verify
from omni_kvlink.system import process

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence, Sized

    import zmq

    from omni_kvlink.connectors.base import InlineTarget
    from omni_kvlink.connectors.control.monitored_socket import MonitoredSocket
    from omni_kvlink.connectors.protocol.get_table import GetState, GetTable
    from omni_kvlink.connectors.protocol.messages import Message
    from omni_kvlink.connectors.runtime.consumer import Session
    from omni_kvlink.connectors.runtime.event_loop import EventLoop
    from omni_kvlink.connectors.runtime.receive_pool import ReceivePool
    from omni_kvlink.payload.manifest import LayoutCache, Manifest


class RemoteGet(SessionGet):
    """A pending get; it is done when the payload has arrived, or with the error."""

    delivery: Delivery | None = None  # that the receiver has taken, for `wait`

    def __init__(self, session: Session, get_state: GetState, receiver: InlineReceiver):
        self.session, self._get_table, self._receiver = session, session.get_table, receiver
        assert get_state.ready is not None
        self.get_state = self._get_state = get_state
        self._done, self._process = get_state.ready, process.current

    def wait(self, *, timeout: float) -> Delivery:
        """Block until the payload has arrived; see `PendingGet`."""
        timeout = check_timeout(timeout)
        deadline = time.monotonic() + timeout
        if timeout and not self._get_state.answer.is_set() and self._process.is_current:
            self._receiver.receive(self, deadline)
            timeout = max(0.0, deadline - time.monotonic())
        if self.delivery is not None:
            delivery, self.delivery = self.delivery, None
            return delivery
        self._get_table.wait(self._get_state, timeout)
        inbound = self._inbound
        try:
            if not inbound.ready.wait(max(0.0, deadline - time.monotonic())):
                self._get_state.phase = inbound.phase
                if inbound.cancel():
                    raise self._get_state.timeout_error()
                inbound.ready.wait(MAX_TIMEOUT)  # it is being set
            inbound.ready.result()
        except KVLinkError:
            self._get_state.settle()
            raise
        except BaseException:
            self.cancel()
            raise
        delivery = inbound.deliver()
        self._get_state.settle()
        return delivery

    def cancel(self) -> None:
        """Stop waiting; a payload that has arrived is released unread. See `PendingGet`."""
        get_state, self.delivery = self._get_state, None
        if get_state.is_settled:
            return
        if self._get_table.cancel(get_state):
            return
        get_state.answer.wait(MAX_TIMEOUT)  # it is being set
        if get_state.answer.error is not None:
            return
        if get_state.inbound is None:  # an interrupt ended `InlineReceiver.receive`
            self._get_table.drop(get_state)
            return
        inbound = self._inbound
        if not inbound.cancel():
            inbound.ready.wait(MAX_TIMEOUT)  # it is being set
            if inbound.ready.error is None:
                inbound.release_unread()
        get_state.settle()

    @property
    def _inbound(self) -> InboundTransfer:
        assert isinstance(self._get_state.inbound, InboundTransfer)
        return self._get_state.inbound


class InlineReceiver(LeadingReceiver):
    """Receives a payload that comes inside its offer in the thread whose get waits for it.

    It takes that payload only, and only if it is as committed. Any other message stays in the
    socket for the loop, whose thread would otherwise receive all of them and wake the get. One
    thread at a time; a get that comes meanwhile waits for the loop.

    A payload is charged to the quota of `receive_pool` until its `Release`.
    """

    socket: MonitoredSocket
    """The session's, from the end of the handshake on."""

    def __init__(
        self,
        loop: EventLoop,
        get_table: GetTable,
        receive_pool: ReceivePool,
        layouts: LayoutCache,
        counters: Counter[str],
        fetching: Sized,
    ):
        super().__init__()
        self._loop, self._get_table, self._receive_pool = loop, get_table, receive_pool
        self._layouts, self._counters, self._fetching = layouts, counters, fetching

    def receive(self, get: RemoteGet, deadline: float) -> None:
        """Block until `get.delivery` is there or the get has ended, to the `deadline` at most.

        It may return earlier, and leave the get to the loop.
        """
        if self._get_table.waiting == 1 and not self._fetching:
            self.receive_until(get.get_state.answer, deadline, get)
        # Else what comes is mostly for others, so that the loop would be woken, too.

    def close(self) -> None:
        """Free the descriptor once no thread uses it; called when the socket is closed."""
        self._wake = None

    def _begin_leading(self, get: RemoteGet) -> int:
        with contextlib.suppress(OSError):  # no descriptor is left
            self._wake = self._wake or Wake()
        wake = self._wake
        if wake is None or not self.socket.pause():
            self._wake = None
            return -1
        get.get_state.answer.add_done_callback(partial(self._on_answer, wake))
        if get.inline_target is not None and get.session.has_inline:
            get.inline_target.open()
        return self.socket.fd if self._receive_next(get) else -1

    def _watch_channel(self) -> None:
        self.socket.resume()

    def _receive_next(self, get: RemoteGet) -> bool:
        """Take the payload if it has come; return whether to wait on, since no message has.

        An interrupt at any line loses nothing: a message is taken away at last, and to handle it
        twice changes nothing.
        """
        socket = self.socket
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
            get._done.set_result(None)
            get.get_state.settle()
        return not frames

    def _take(self, offer: Offer, payload: memoryview, get: RemoteGet) -> None:
        """Answer the get with the payload, unless it is damaged or there is no room for it."""
        get_state, owner, has_room = get.get_state, (self._get_table, offer.get_id), False
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
        fault_points.point("fetch.chunk")
        self._get_table.on_message(offer)
        if get_state.offer is not offer:  # it was ended meanwhile, and the payload released unread
            if get.inline_target is not None:
                get.inline_target.discard()
            return
        fault_points.point("get.mapped")
        get.session.has_inline = True
        self._counters["verified" if is_verified else "unverified"] += 1
        lease = GetLease(self._get_table, offer.get_id, offer.epoch)
        get.delivery = Delivery(
            get_state.key, region, lease, manifest=manifest, copies=1, is_verified=is_verified
        )

    def _on_answer(self, wake: Wake, answer: object) -> None:
        """Wake the leader: another thread has ended its get, if only by the end of the session."""
        if self._leader not in (0, threading.get_ident()):
            wake.set()


def _decoded(frames: Sequence[zmq.Frame]) -> Message | None:
    """Return the message of these frames; None if there is none, or it is damaged."""
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
    """Return memory with the payload, its manifest if decoded, and whether each byte was compared.

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
