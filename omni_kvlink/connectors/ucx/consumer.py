"""The connecting end: as over ZMQ, but UCX writes what was asked for to its place."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any

from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.protocol.fetch_plan import FetchLimits
from omni_kvlink.connectors.protocol.messages import Chunk, Meet, Message, Release, unexpected
from omni_kvlink.connectors.runtime.inbound_transfer import InboundTransfer
from omni_kvlink.connectors.ucx.access_policy import PACE, endpoint_of, settings_of
from omni_kvlink.connectors.ucx.tags import Tags
from omni_kvlink.connectors.ucx.transport import UcxEndpoint, UcxRequest, UcxTransport
from omni_kvlink.connectors.zmq.consumer import ZmqConsumer, ZmqSession
from omni_kvlink.errors import ClosedError, KVLinkError, PeerLostError, WireError


class UcxConsumer(ZmqConsumer):
    """The reading end of `ucx://host:port`; one plane, whatever becomes of its sessions."""

    def __init__(self, address: str, options: Options):
        self._ucx_transport: UcxTransport | None = None
        super().__init__(endpoint_of(address), options)
        try:
            self._ucx_transport = UcxTransport(settings_of(self._endpoint, options))
        except BaseException:
            self.close()
            raise

    def health(self) -> dict[str, Any]:
        return {**super().health(), "ucx": self._must().stats()}

    def close(self) -> None:
        if (
            self._ucx_transport is not None and self._ucx_transport.is_own_thread
        ):  # a forgotten link, collected there
            threading.Thread(target=super().close, name="kvlink-close", daemon=True).start()
        else:
            super().close()

    def _make_session(self) -> UcxSession:
        return UcxSession(
            self._must(),
            self._endpoint,
            self._options,
            self._context,
            self._loop,
            self._receive_pool,
        )

    def _shut(self) -> None:
        super()._shut()
        if self._ucx_transport is not None:
            self._ucx_transport.close()

    def _must(self) -> UcxTransport:
        assert self._ucx_transport is not None
        return self._ucx_transport


class UcxSession(ZmqSession):
    """One connection: ZMQ's, and beside it one of UCX."""

    def __init__(self, ucx_transport: UcxTransport, *base: Any):
        super().__init__(*base)
        self._ucx_transport, self._tags = ucx_transport, Tags.new()
        self._peer: UcxEndpoint | None = None
        self._requests: dict[int, dict[int, UcxRequest]] = {}

    @property
    def pace(self) -> FetchLimits:
        return PACE

    # In the loop's thread

    def on_message(self, message: Message, beside: bytes = b"") -> None:
        if isinstance(message, Meet):
            self._meet(message)
        elif self._peer is None:
            raise WireError(f"{self._url} does not say where UCX reaches it")
        else:
            super().on_message(message, beside)

    def on_chunk(self, chunk: Chunk, payload: memoryview) -> None:
        unexpected(chunk)

    def _welcomed(self) -> None:
        self._carry(Meet(self._ucx_transport.address, self._tags.secret))

    def _meet(self, meet: Meet) -> None:
        if self._peer is not None:
            raise WireError(f"{self._url} said twice where it is")
        self._peer = self._ucx_transport.connect(meet.address)
        self.answer()

    def _ask(self, inbound: InboundTransfer, start: int, stop: int) -> None:
        """Receive first: UCX throws away what nobody waits for."""
        assert self._peer is not None
        get_id, region = inbound.offer.get_id, inbound.lend(start, stop)
        tag = self._tags.of(get_id, inbound.offer.epoch, start, stop)
        came = partial(self._came, get_id, start, stop - start)
        try:
            request = self._ucx_transport.receive(
                self._peer, region, tag, lambda error: self._loop.call(partial(came, error))
            )
        except ClosedError as error:
            self._loop.call(partial(self.end, PeerLostError(f"{self._url}: {error}")))
            return
        self._requests.setdefault(get_id, {})[start] = request
        super()._ask(inbound, start, stop)

    def _came(self, get_id: int, start: int, nbytes: int, error: BaseException | None) -> None:
        """UCX is done with a piece; of a payload that was let go of, nobody cares."""
        self._requests.get(get_id, {}).pop(start, None)
        inbound = self._inbound_transfers.get(get_id)
        if inbound is None or self._over:
            return
        try:
            if error is None:
                inbound.landed(start, nbytes)
            elif isinstance(error, WireError):
                raise error
            elif not isinstance(error, TimeoutError):
                raise PeerLostError(f"{self._url}: {error}")
        except KVLinkError as problem:
            self.end(problem)

    def _release(self, message: Message) -> None:
        super()._release(message)
        assert isinstance(message, Release)
        for request in self._requests.pop(message.get_id, {}).values():
            with contextlib.suppress(ClosedError):
                self._ucx_transport.abandon(request)

    def _hang_up(self) -> None:
        super()._hang_up()
        if self._peer is not None:
            with contextlib.suppress(ClosedError):
                self._ucx_transport.disconnect(self._peer)
