"""The consumer of `ucx://`: UCX writes the fetched ranges into the consumer's memory."""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.control.consumer import ControlConsumer
from omni_kvlink.connectors.control.receive_pool import ReceivePool, SessionResources
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.messages import (
    MAX_MESSAGE,
    Release,
    TransportAddress,
    unexpected,
)
from omni_kvlink.connectors.ucx.addressing import SECRET_NBYTES, tag_of
from omni_kvlink.connectors.ucx.payload_memory import PayloadMemory
from omni_kvlink.connectors.ucx.settings import FETCH_LIMITS, UcxSettings
from omni_kvlink.connectors.ucx.transport import UcxEndpoint, UcxRequest, UcxTransport
from omni_kvlink.errors import ClosedError, KVLinkError, PeerLostError, WireError

if TYPE_CHECKING:
    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.remote_get import InboundTransfer
    from omni_kvlink.connectors.protocol.messages import Chunk, Message
    from omni_kvlink.connectors.runtime.consumer import Session


class UcxConsumer(ControlConsumer):
    """The consumer of `ucx://host:port`; all of its sessions share one `UcxTransport`."""

    _ucx_transport: UcxTransport | None = None
    _has_lanes = False

    def stats(self) -> dict[str, Any]:
        """Return state and counters, as JSON values."""
        ucx_transport = self._ucx_transport
        return super().stats() | ({"ucx": ucx_transport.stats()} if ucx_transport else {})

    def close(self) -> None:
        """Close the link; blocks up to 1.5 s more if UCX waits for a peer that does not answer."""
        if self._ucx_transport is not None and self._ucx_transport.is_own_thread:
            # The link is garbage-collected in UCX's thread, which cannot wait for its own end.
            threading.Thread(target=super().close, name="kvlink-close", daemon=True).start()
        else:
            super().close()

    def _open(self, timeout: float, *, no_wait: bool = False) -> Session:
        if self._ucx_transport is None:
            settings = UcxSettings.of_link(self._address, self._options)
            self._ucx_transport = UcxTransport(settings, device=self.device)
            self._closers.append(self._ucx_transport.close)
            self._make_session = partial(UcxSession, ucx_transport=self._ucx_transport)
        return super()._open(timeout, no_wait=no_wait)

    def _make_pool(self, options: Options) -> ReceivePool:
        memory = PayloadMemory.of_link(self._address, options)
        self.device, self.host_reason = memory.device, memory.host_reason
        if not memory.device:
            return super()._make_pool(options)
        return ReceivePool(
            options.quota, self._loop, self._close_if_unused_in_loop, make=memory.make
        )


class UcxSession(ControlSession):
    """A control connection, and a UCX connection to the same producer."""

    max_frame_nbytes, fetch_limits = MAX_MESSAGE, FETCH_LIMITS
    can_resume = False  # UCX may write to the memory for seconds after its end

    def __init__(self, resources: SessionResources, ucx_transport: UcxTransport):
        super().__init__(resources)
        self.path = ucx_transport.settings.path
        self._ucx_transport, self._secret = ucx_transport, os.urandom(SECRET_NBYTES)
        self._endpoint: UcxEndpoint | None = None
        self._requests: dict[int, dict[int, UcxRequest]] = {}

    def on_message_in_loop(self, message: Message, inline_bytes: bytes = b"") -> None:
        """Handle a message of the producer; see `RemoteSession`."""
        if isinstance(message, TransportAddress):
            self._on_address_in_loop(message)
        elif self._endpoint is None:
            raise WireError(f"{self._url} does not say where UCX reaches it")
        else:
            super().on_message_in_loop(message, inline_bytes)

    def on_chunk_in_loop(self, chunk: Chunk, payload: memoryview) -> None:
        """Refuse bytes on the control channel."""
        unexpected(chunk)

    def _on_greeted_in_loop(self) -> None:
        self._transmit_in_loop(TransportAddress(self._ucx_transport.address, self._secret))

    def _on_address_in_loop(self, address: TransportAddress) -> None:
        if self._endpoint is not None:
            raise WireError(f"{self._url} sent its UCX address twice")
        self._endpoint = self._ucx_transport.connect(address.address)
        self.set_ready_in_loop()

    def _fetch_range_in_loop(self, inbound: InboundTransfer, start: int, stop: int) -> None:
        """Post the receive, then send the request: UCX discards what no receive waits for."""
        assert self._endpoint is not None
        get_id, region = inbound.offer.get_id, inbound.borrow(start, stop)
        tag = tag_of(self._secret, get_id, inbound.offer.epoch, start, stop)
        on_received = partial(self._on_received_in_loop, get_id, start, stop - start)

        def done(error: BaseException | None) -> None:
            self._loop.call(partial(on_received, error))

        try:
            request = self._ucx_transport.receive(self._endpoint, region, tag, done)
        except ClosedError as error:
            problem = PeerLostError(f"{self._url}: {error}")
            self._loop.call(partial(self.disconnect_in_loop, problem))
            return
        self._requests.setdefault(get_id, {})[start] = request
        super()._fetch_range_in_loop(inbound, start, stop)

    def _on_received_in_loop(
        self, get_id: int, start: int, nbytes: int, error: BaseException | None
    ) -> None:
        """UCX has completed a receive; ignore it if its payload was released meanwhile."""
        self._requests.get(get_id, {}).pop(start, None)
        inbound = self._inbound_transfers.get(get_id)
        if inbound is None or self.is_closed:
            return
        if isinstance(error, WireError):
            self.disconnect_in_loop(error)
        elif error is None:
            try:
                inbound.on_received(start, nbytes)
            except KVLinkError as problem:
                self.disconnect_in_loop(problem)
        elif not isinstance(error, TimeoutError):
            self.disconnect_in_loop(PeerLostError(f"{self._url}: {error}"))

    def _on_release_in_loop(self, message: Message) -> None:
        super()._on_release_in_loop(message)
        assert isinstance(message, Release)
        for request in self._requests.pop(message.get_id, {}).values():
            with contextlib.suppress(ClosedError):
                self._ucx_transport.cancel(request)

    def _forget_connection_in_loop(self) -> None:
        super()._forget_connection_in_loop()
        self._disconnect_endpoint_in_loop()

    def _close_connection_in_loop(self) -> None:
        super()._close_connection_in_loop()
        self._disconnect_endpoint_in_loop()

    def _disconnect_endpoint_in_loop(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            with contextlib.suppress(ClosedError):
                self._ucx_transport.disconnect(endpoint)
