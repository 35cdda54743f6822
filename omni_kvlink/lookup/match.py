"""`Match`: the result of a `select`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from omni_kvlink.link import ReadBlock

if TYPE_CHECKING:
    from omni_kvlink.link import Received
    from omni_kvlink.payload.schema import KVCacheTransferData
    from omni_kvlink.payload.views import TensorView


class Match(ReadBlock):
    """K and V of the first tokens of a prompt, on lease until `release`; a context manager.

    Of the `requested` tokens of the prompt, the first `tokens` need not be computed. These are
    fewer if there is no `hidden`: at least one token must be computed, for its logits. `data` has
    their K and V, readonly, for an adapter's `load`; None for no tokens. `hidden`, `[1, dim]`, is
    the last hidden state of the prompt's last token if all were found: no forward pass is needed.
    """

    def __init__(
        self,
        requested: int,
        data: KVCacheTransferData | None = None,
        hidden: torch.Tensor | None = None,
        received: Received | None = None,
    ):
        self.requested, self.data, self.hidden = requested, data, hidden
        self.tokens = 0 if data is None else data.metadata.seq_len
        self._received = received

    @property
    def is_complete(self) -> bool:
        """Whether nothing has to be computed."""
        return self.tokens == self.requested

    @property
    def roi(self) -> torch.Tensor:
        """Bool `[requested]`: the tokens that were found."""
        return torch.arange(self.requested) < self.tokens

    @property
    def keys(self) -> list[TensorView | None]:
        """K `[tokens, kv_heads, head_dim]` of each layer."""
        return [] if self.data is None else self.data.layer_blocks["key_cache"]

    @property
    def values(self) -> list[TensorView | None]:
        """V `[tokens, kv_heads, head_dim]` of each layer."""
        return [] if self.data is None else self.data.layer_blocks["value_cache"]

    def release(self) -> None:
        """Release the lease; tensors kept elsewhere stay valid. A second call does nothing."""
        if (received := self._close()) is not None:
            received.release()

    def release_unread(self) -> None:
        """Release the lease of a match that was not used; the answer's receipt says so."""
        if (received := self._close()) is not None:
            received.release_unread()

    def _close(self) -> Received | None:
        """Drop the tensors; return what is to be released, the first time."""
        received, self._received = self._received, None
        if received is not None and self.data is not None:
            self.data.close()
            self.hidden = None
        return received

    def __enter__(self) -> Match:
        return self

    def __del__(self) -> None:
        if getattr(self, "_received", None) is not None:
            warnings.warn(f"{self!r} was not released", ResourceWarning, stacklevel=2)
            if (received := self._close()) is not None:
                received.drop_unread()  # it takes no lock

    def __repr__(self) -> str:
        return f"<Match: {self.tokens} of {self.requested} tokens{', hidden' * self.is_complete}>"
