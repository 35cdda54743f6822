"""`LocalSource`: what this process keeps itself, as views of its link's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.link import contains_kept, open_kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.kept.kept_receipts import KeptReceipts
    from omni_kvlink.kept.source import Reason
    from omni_kvlink.link import KVProducer, Received


class LocalSource:
    """Reads what the link of this process keeps, without a connection to it; thread-safe."""

    def __init__(self, link: KVProducer, kept: KeptReceipts):
        self._link, self._kept = link, kept

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is kept here; one that is counts as used."""
        here = [key for key in keys if key in self._kept]
        is_kept = dict(zip(here, contains_kept(self._link, here), strict=True))
        return [is_kept.get(key, False) for key in keys]

    def read(self, keys: Sequence[str], *, timeout: float) -> list[Received | Reason]:
        """Do the same as `KeptSource.read`; it waits for nothing."""
        results: list[Received | Reason] = []
        try:
            for key in keys:
                received = open_kept(self._link, key) if key in self._kept else None
                results.append(self._reason(key) if received is None else received)
        except BaseException:
            for result in results:
                if not isinstance(result, str):
                    result.release_unread()
            raise
        return results

    def _reason(self, key: str) -> Reason:
        state = self._kept.state(key)
        return "evicted" if state == "evicted" else "damaged" if state == "failed" else "absent"
