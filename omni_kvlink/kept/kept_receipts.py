"""`KeptReceipts`: which keys this process keeps now, by the receipts of their puts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Receipt

_HERE = frozenset(("committed", "leased"))
_SPARE = 1024
"""Receipts of payloads that have ended, which are kept before they are looked for."""


class KeptReceipts:
    """The receipts of kept payloads, by key; thread-safe, and takes no lock."""

    def __init__(self) -> None:
        self._receipts: dict[str, Receipt] = {}
        self._look_at = _SPARE

    def add(self, receipt: Receipt) -> None:
        """Add the receipt of a put."""
        self._receipts[receipt.key] = receipt
        if len(self._receipts) >= self._look_at:
            self._forget_ended()

    def discard(self, key: str) -> None:
        """Forget a key."""
        self._receipts.pop(key, None)

    def state(self, key: str) -> str:
        """The state of a key's last payload, as `Receipt.state`; "" if none is known."""
        receipt = self._receipts.get(key)
        return "" if receipt is None else receipt.state

    def __contains__(self, key: str) -> bool:
        return self.state(key) in _HERE

    def live(self) -> list[str]:
        """The keys that are kept now, the first put first."""
        return [key for key, receipt in list(self._receipts.items()) if receipt.state in _HERE]

    def _forget_ended(self) -> None:
        """Forget the payloads that have ended."""
        for key, receipt in list(self._receipts.items()):
            if receipt.state not in _HERE and self._receipts.get(key) is receipt:
                del self._receipts[key]
        self._look_at = 2 * len(self._receipts) + _SPARE
