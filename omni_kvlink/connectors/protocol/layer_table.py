"""`LayerTable`: a producer's payloads that are offered while they are written, without I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.messages import Layer
from omni_kvlink.connectors.protocol.transfer import TransferState

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.chunk_window import ChunkWindow
    from omni_kvlink.connectors.protocol.direct_source import DirectSource
    from omni_kvlink.connectors.protocol.messages import Location, Message
    from omni_kvlink.connectors.protocol.transfer import Peer, Transfer


class LayerTable:
    """The beginning of such payloads and their layers; see `TransferTable`, whose lock is held.

    `send` takes a message for a peer, `offer` leases a payload to the gets that wait for it.
    """

    def __init__(self, send: Callable[[Peer, Message], None], offer: Callable[[Transfer], None]):
        self._send, self._offer = send, offer

    def begin(
        self,
        transfer: Transfer,
        location: Location,
        draft: int,
        readers: int | None,
        direct: DirectSource | None = None,
        window: ChunkWindow[Transfer] | None = None,
    ) -> None:
        """Offer a payload that is still being written, to gets that take streams.

        With a `window` it is an append stream, whose chunks follow. With `direct` it is sent from
        the caller's tensors: it may be committed as soon as `Transfer.is_sent`, and cannot be
        delivered again after that. Raises TransferFailed if it was aborted meanwhile.
        """
        transfer.check_writing()
        transfer.direct, transfer.window = direct, window
        transfer.location, transfer.draft, transfer.unclaimed = location, draft, readers or 1
        transfer.is_kept = readers is None
        transfer.state = TransferState.STREAMING
        self._offer(transfer)

    def announce(self, transfer: Transfer, first: int, digests: tuple[bytes, ...]) -> None:
        """Tell the readers of a stream that the tensors from number `first` on are written.

        Raises TransferFailed if the transfer was aborted, or a reader rejected it.
        """
        transfer.check_writing()
        transfer.layers = transfer.layers or []
        transfer.layers.append((first, digests))
        for peer, get_id in transfer.leases:
            self._send(peer, Layer(get_id, first, digests))
