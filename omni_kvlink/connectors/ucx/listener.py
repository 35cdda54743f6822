"""The serving end: as over ZMQ, but bytes leave by UCX, one message for each range asked for."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.protocol.messages import FetchRange, Meet, Message, encode
from omni_kvlink.connectors.protocol.transfer import Transfer
from omni_kvlink.connectors.ucx.access_policy import PACE, settings_of
from omni_kvlink.connectors.ucx.tags import Tags
from omni_kvlink.connectors.ucx.transport import UcxEndpoint, UcxTransport
from omni_kvlink.connectors.zmq.listener import ZmqListener, ZmqPeerConnection
from omni_kvlink.errors import ClosedError, PeerLostError, WireError

if TYPE_CHECKING:
    from omni_kvlink.connectors.runtime.producer import PooledProducer


class Met(NamedTuple):
    """How a reader is reached by UCX, and what its messages are called."""

    endpoint: UcxEndpoint
    tags: Tags


class UcxListener(ZmqListener):
    """Readers say where UCX reaches them, and have their bytes sent there.

    Args:
        optional: a reader that does not say it has them over ZMQ.
    """

    most_ahead = 2 * PACE.window

    def __init__(
        self,
        endpoint: ControlAddress,
        options: Options,
        producer: PooledProducer,
        *,
        optional: bool = False,
    ):
        self._met: dict[ZmqPeerConnection, Met] = {}
        self._is_optional = optional
        self.transports = ("ucx", "zmq") if optional else ("ucx",)
        super().__init__(endpoint, options, producer)

    def _bind(self, options: Options) -> None:
        self._ucx_transport = UcxTransport(settings_of(self._endpoint, options))
        try:
            super()._bind(options)
        except BaseException:
            self._ucx_transport.close()
            raise

    def health(self) -> dict[str, Any]:
        return {**super().health(), "ucx": self._ucx_transport.stats()}

    def refuses(self, device: str) -> str:
        if device == "cpu" or (device.startswith("cuda") and self._ucx_transport.has_cuda):
            is_for_all = device == "cpu" or not self._is_optional
            return "" if is_for_all else "readers without UCX could not have it"
        tls = self._ucx_transport.settings.transports
        return f"UCX has {tls} alone, ucx_tls='{tls},cuda_copy' reaches a GPU"

    @property
    def is_own_thread(self) -> bool:
        return self._ucx_transport.is_own_thread

    # In the loop's thread

    def _handle(self, reader: ZmqPeerConnection, message: Message) -> None:
        if isinstance(message, Meet):
            self._meet(reader, message)
        elif reader in self._met or self._is_optional:
            super()._handle(reader, message)
        else:
            self._count("bad message")
            self._turn_out(reader, "this link is ucx://, and it did not say where UCX reaches it")

    def _meet(self, reader: ZmqPeerConnection, meet: Meet) -> None:
        if reader in self._met:
            raise WireError("a reader says once where it is")
        try:
            tags = Tags(meet.secret)
            self._met[reader] = Met(self._ucx_transport.connect(meet.address), tags)
        except ClosedError as error:
            self._turn_out(reader, str(error))
        except ValueError as error:
            raise WireError(str(error)) from None
        else:
            self._say(reader, [encode(Meet(self._ucx_transport.address))])

    def _answer(self, reader: ZmqPeerConnection, fetch: FetchRange, transfer: Transfer) -> None:
        met = self._met.get(reader)
        if met is None:
            super()._answer(reader, fetch, transfer)
            return
        tag = met.tags.of(fetch.get_id, fetch.epoch, fetch.start, fetch.stop)
        piece = self._borrow_piece(reader, fetch, transfer, fetch.start, fetch.stop)
        try:
            self._ucx_transport.send(met.endpoint, piece, tag, partial(self._sent, reader))
        except ClosedError as error:
            self._cut_off(reader, str(error))

    def _sent(self, reader: ZmqPeerConnection, error: BaseException | None) -> None:
        """In UCX's thread; the memory comes back by the end of its piece, not by this."""
        if isinstance(error, PeerLostError):
            self._loop.call(partial(self._cut_off, reader, str(error)))

    def _cut_off(self, reader: ZmqPeerConnection, why: str) -> None:
        """Control may still stand: the reader would wait in vain."""
        with self._socket.turn:
            if reader in self._met:
                self._turn_out(reader, f"UCX does not reach it: {why}")

    def _drop(self, reader: ZmqPeerConnection) -> None:
        super()._drop(reader)
        met = self._met.pop(reader, None)
        if met is not None:
            with contextlib.suppress(ClosedError):
                self._ucx_transport.disconnect(met.endpoint)

    def shut(self) -> None:
        """Last words first: a reader that UCX lost already would not wait for them."""
        super().shut()
        self._ucx_transport.close()
        self._met.clear()
