"""Sends payloads by UCX, one message for each range that a peer fetches."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.control.peer import PeerConnection, RangeSender
from omni_kvlink.connectors.protocol.messages import FetchRange, TransportAddress
from omni_kvlink.connectors.ucx.addressing import SECRET_NBYTES, tag_of
from omni_kvlink.connectors.ucx.settings import FETCH_LIMITS, UcxSettings
from omni_kvlink.connectors.ucx.transport import UcxEndpoint, UcxTransport
from omni_kvlink.errors import ClosedError, PeerLostError, WireError

if TYPE_CHECKING:
    from omni_kvlink.connectors.control.listener import ControlListener
    from omni_kvlink.connectors.protocol.path import LinkPath
    from omni_kvlink.connectors.protocol.transfer import Transfer


class UcxSender(RangeSender):
    """Sends to peers that have said where UCX reaches them."""

    transport = "ucx"
    max_in_flight = 2 * FETCH_LIMITS.window
    needs_address = True

    def __init__(self, listener: ControlListener, *, device: str = ""):
        self._listener = listener
        self._connected: dict[PeerConnection, tuple[UcxEndpoint, bytes]] = {}
        settings = UcxSettings.of_link(listener.address, listener.options)
        self._ucx = UcxTransport(settings, device=device)

    @property
    def path(self) -> LinkPath:
        """See `UcxSettings.path`."""
        return self._ucx.settings.path

    def direct_refusal(self, device: str) -> str:
        """Return why tensors of a device cannot be sent; "" for host memory, and CUDA if set up."""
        if device == "cpu" or (device.startswith("cuda") and self._ucx.has_cuda):
            return ""
        tls = self._ucx.settings.transports
        return f"UCX has only {tls}, ucx_tls='{tls},cuda_copy' reaches a GPU"

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is UCX's thread."""
        return self._ucx.is_own_thread

    def stats(self) -> dict[str, Any]:
        """Return what `UcxTransport.stats` returns."""
        return self._ucx.stats()

    def connect(self, peer: PeerConnection, address: TransportAddress) -> TransportAddress:
        """Connect UCX to a peer; see `RangeSender`."""
        if len(address.secret) != SECRET_NBYTES:
            raise WireError(f"a secret of {len(address.secret)} bytes; expected {SECRET_NBYTES}")
        self._connected[peer] = self._ucx.connect(address.address), address.secret
        return TransportAddress(self._ucx.address)

    def send_range(self, peer: PeerConnection, fetch: FetchRange, transfer: Transfer) -> None:
        """Send the bytes of one request; see `RangeSender`."""
        endpoint, secret = self._connected[peer]
        tag = tag_of(secret, fetch.get_id, fetch.epoch, fetch.start, fetch.stop)
        piece = self._listener.borrow(peer, fetch, transfer, fetch.start, fetch.stop)
        try:
            self._ucx.send(endpoint, piece, tag, partial(self._on_sent, peer))
        except ClosedError as error:
            self._refuse(peer, str(error))

    def on_peer_lost(self, peer: PeerConnection) -> None:
        """Disconnect UCX from a peer."""
        if peer in self._connected:
            endpoint, _ = self._connected.pop(peer)
            with contextlib.suppress(ClosedError):
                self._ucx.disconnect(endpoint)

    def close(self) -> None:
        """Close UCX; blocks up to 1.5 s if a peer does not answer."""
        self._ucx.close()
        self._connected.clear()

    def _on_sent(self, peer: PeerConnection, error: BaseException | None) -> None:
        """Runs in UCX's thread; the piece's memory is freed by its finalizer, not here."""
        if isinstance(error, PeerLostError):
            self._listener.loop.call(partial(self._refuse, peer, str(error)))

    def _refuse(self, peer: PeerConnection, reason: str) -> None:
        """Tell a peer whose control connection still works that its bytes will not come."""
        with self._listener.lock:
            if peer in self._connected:
                self._listener.refuse(peer, f"UCX does not reach it: {reason}")
