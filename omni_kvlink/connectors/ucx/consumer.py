"""The consumer of `ucx://`: UCX writes the fetched ranges into the consumer's memory."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.control.consumer import ControlConsumer
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.messages import (
    Chunk,
    Message,
    Release,
    TransportAddress,
    unexpected,
)
from omni_kvlink.connectors.ucx.addressing import Tags
from omni_kvlink.connectors.ucx.settings import FETCH_LIMITS, UcxSettings
from omni_kvlink.connectors.ucx.transport import UcxEndpoint, UcxRequest, UcxTransport
from omni_kvlink.errors import ClosedError, KVLinkError, PeerLostError, WireError

if TYPE_CHECKING:
    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.address import ControlAddress
    from omni_kvlink.connectors.protocol.fetch_plan import FetchLimits
    from omni_kvlink.connectors.runtime.inbound_transfer import InboundTransfer


class UcxConsumer(ControlConsumer):
    """The consumer of `ucx://host:port`; all of its sessions share one `UcxTransport`."""

    def __init__(self, address: ControlAddress, options: Options):
        self._ucx_transport: UcxTransport | None = None
        super().__init__(address, options)
        try:
            self._ucx_transport = UcxTransport(UcxSettings.of_link(address, options))
        except BaseException:
            self.close()
            raise

    def health(self) -> dict[str, Any]:
        """Return state and counters, as JSON values."""
        return {**super().health(), "ucx": self._transport().stats()}

    def close(self) -> None:
        """Close the link; blocks up to 1.5 s more if UCX waits for a peer that does not answer."""
        if self._ucx_transport is not None and self._ucx_transport.is_own_thread:
            # The link is garbage-collected in UCX's thread, which cannot wait for its own end.
            threading.Thread(target=super().close, name="kvlink-close", daemon=True).start()
        else:
            super().close()

    def _make_session(self) -> UcxSession:
        return UcxSession(
            self._transport(),
            self._address,
            self._options,
            self._context,
            self._loop,
            self._receive_pool,
        )

    def _close_resources(self) -> None:
        super()._close_resources()
        if self._ucx_transport is not None:
            self._ucx_transport.close()

    def _transport(self) -> UcxTransport:
        assert self._ucx_transport is not None
        return self._ucx_transport


class UcxSession(ControlSession):
    """A control connection, and a UCX connection to the same producer."""

    def __init__(self, ucx_transport: UcxTransport, *base: Any):
        super().__init__(*base)
        self._ucx_transport, self._tags = ucx_transport, Tags.new()
        self._endpoint: UcxEndpoint | None = None
        self._requests: dict[int, dict[int, UcxRequest]] = {}

    @property
    def fetch_limits(self) -> FetchLimits:
        """Bytes to request at a time, and bytes that may be requested and not yet received."""
        return FETCH_LIMITS

    # In the loop's thread

    def on_message(self, message: Message, inline_bytes: bytes = b"") -> None:
        """Handle a message of the producer; see `RemoteSession`."""
        if isinstance(message, TransportAddress):
            self._on_address(message)
        elif self._endpoint is None:
            raise WireError(f"{self._url} does not say where UCX reaches it")
        else:
            super().on_message(message, inline_bytes)

    def on_chunk(self, chunk: Chunk, payload: memoryview) -> None:
        """Refuse bytes on the control channel."""
        unexpected(chunk)

    def _on_greeted(self) -> None:
        self._transmit(TransportAddress(self._ucx_transport.address, self._tags.secret))

    def _on_address(self, address: TransportAddress) -> None:
        if self._endpoint is not None:
            raise WireError(f"{self._url} sent its UCX address twice")
        self._endpoint = self._ucx_transport.connect(address.address)
        self.set_ready()

    def _fetch_range(self, inbound: InboundTransfer, start: int, stop: int) -> None:
        """Post the receive, then send the request: UCX discards what no receive waits for."""
        assert self._endpoint is not None
        get_id, region = inbound.offer.get_id, inbound.borrow(start, stop)
        tag = self._tags.of(get_id, inbound.offer.epoch, start, stop)
        on_received = partial(self._on_received, get_id, start, stop - start)
        try:
            request = self._ucx_transport.receive(
                self._endpoint,
                region,
                tag,
                lambda error: self._loop.call(partial(on_received, error)),
            )
        except ClosedError as error:
            problem = PeerLostError(f"{self._url}: {error}")
            self._loop.call(partial(self.disconnect, problem))
            return
        self._requests.setdefault(get_id, {})[start] = request
        super()._fetch_range(inbound, start, stop)

    def _on_received(
        self, get_id: int, start: int, nbytes: int, error: BaseException | None
    ) -> None:
        """UCX has completed a receive; ignore it if its payload was released meanwhile."""
        self._requests.get(get_id, {}).pop(start, None)
        inbound = self._inbound_transfers.get(get_id)
        if inbound is None or self.is_closed:
            return
        try:
            if error is None:
                inbound.on_received(start, nbytes)
            elif isinstance(error, WireError):
                raise error
            elif not isinstance(error, TimeoutError):
                raise PeerLostError(f"{self._url}: {error}")
        except KVLinkError as problem:
            self.disconnect(problem)

    def _on_release(self, message: Message) -> None:
        super()._on_release(message)
        assert isinstance(message, Release)
        for request in self._requests.pop(message.get_id, {}).values():
            with contextlib.suppress(ClosedError):
                self._ucx_transport.cancel(request)

    def _close_connection(self) -> None:
        super()._close_connection()
        if self._endpoint is not None:
            with contextlib.suppress(ClosedError):
                self._ucx_transport.disconnect(self._endpoint)
