"""`Tombstones`: why keys have no payload any more."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.connectors.protocol.messages import shorten

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.messages import Ending
    from omni_kvlink.connectors.protocol.transfer import TransferState

MAX_TOMBSTONES = 4096
"""Failed or expired keys that are remembered, and delivered ones: a later get learns the reason;
and as many that a reader aborted before there was a payload: of those a reader can send any number.
"""
TOMBSTONE_SECONDS = 300.0


class Tombstone(NamedTuple):
    """Why a key has no payload; a get of it fails with this until `expires`."""

    expires: float
    reason: str
    ending: Ending


class Tombstones:
    """The endings of keys, the oldest first; under the owner's lock.

    Attributes:
        failed: keys that failed, were aborted by their producer, or expired.
        aborted: keys that a reader aborted before there was a payload.
        delivered: keys whose payload ended well, and its last state: gets of them wait. At most
            `MAX_TOMBSTONES`.
    """

    def __init__(self) -> None:
        self.failed: OrderedDict[str, Tombstone] = OrderedDict()
        self.aborted: OrderedDict[str, Tombstone] = OrderedDict()
        self.delivered: OrderedDict[str, TransferState] = OrderedDict()
        self.all = self.failed, self.aborted, self.delivered

    def add_failed(self, key: str, reason: str, ending: Ending, now: float) -> str:
        """Remember why a key has failed, for `TOMBSTONE_SECONDS`; return the reason, shortened."""
        return _add(self.failed, key, reason, ending, now)

    def add_aborted(self, key: str, reason: str, now: float) -> str:
        """Remember why a reader aborted a key; as `add_failed`."""
        return _add(self.aborted, key, reason, "aborted", now)

    def add_delivered(self, key: str, state: TransferState) -> None:
        """Remember that the payload of a key ended well, in this state."""
        self.delivered[key] = state
        if len(self.delivered) > MAX_TOMBSTONES:
            self.delivered.popitem(last=False)

    def tick(self, now: float) -> None:
        """Forget those that are due."""
        for tombstones in (self.failed, self.aborted):
            while tombstones and next(iter(tombstones.values())).expires <= now:
                tombstones.popitem(last=False)


def _add(
    tombstones: OrderedDict[str, Tombstone], key: str, reason: str, ending: Ending, now: float
) -> str:
    tombstones.pop(key, None)
    tombstones[key] = Tombstone(now + TOMBSTONE_SECONDS, shorten(reason), ending)
    if len(tombstones) > MAX_TOMBSTONES:
        tombstones.popitem(last=False)
    return shorten(reason)
