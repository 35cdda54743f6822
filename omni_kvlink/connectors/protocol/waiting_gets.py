"""`WaitingGets`: the gets of a producer's peers that wait for a payload."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Claim, Peer

MAX_WAITING = 1 << 16
"""Gets that may wait; then a peer with less than an equal share of them may still add some."""

MAX_KEY_CHARS = 8_388_608
"""Characters of all keys together that one peer's gets may wait for."""

Taken = tuple[bool, int]
"""The kind of a get: whether it takes layers while they are written; and the number of the first
chunk that it takes of an append stream, or `WHOLE` for a payload."""
WHOLE = -1


class WaitingGets:
    """The gets that wait, by key in the order in which they came, and by peer.

    Under the owner's lock. After an interrupt at any line, `remove` of the same get ends its work.
    """

    def __init__(self) -> None:
        self._claims: dict[str, dict[Claim, Taken]] = {}
        self._keys: dict[Peer, dict[int, str]] = {}
        self._key_chars: dict[Peer, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._claims.values()))

    def refusal(self, peer: Peer, key: str) -> str:
        """Why a peer may not add a get of this key; "" if it may."""
        own = len(self._keys.get(peer, ()))
        share = MAX_WAITING // (len(self._keys) + 1)
        if own >= share and sum(map(len, self._keys.values())) >= MAX_WAITING:
            return f"more than {MAX_WAITING} gets wait already, and {own} of this reader"
        if self._key_chars.get(peer, 0) + len(key) > MAX_KEY_CHARS:
            return f"the keys that this reader waits for exceed {MAX_KEY_CHARS} characters"
        return ""

    def add(self, key: str, claim: Claim, taken: Taken) -> None:
        """Let a get wait."""
        peer, get_id = claim
        self._claims.setdefault(key, {})[claim] = taken
        self._keys.setdefault(peer, {})[get_id] = key
        self._key_chars[peer] = self._key_chars.get(peer, 0) + len(key)

    def remove(self, key: str, claim: Claim) -> None:
        """End the waiting of a get."""
        peer, get_id = claim
        nchars, keys = len(key), self._keys.get(peer, {})
        if get_id in keys:  # else an interrupt came below
            del keys[get_id]
            self._key_chars[peer] -= nchars
        if not keys:
            self._keys.pop(peer, None)
            self._key_chars.pop(peer, None)
        del self._claims[key][claim]
        if not self._claims[key]:
            del self._claims[key]

    def by_key(self, key: str) -> list[tuple[Claim, Taken]]:
        """The gets that wait for a key, the longest waiting first."""
        claims = self._claims.get(key)
        return list(claims.items()) if claims else []

    def by_peer(self, peer: Peer) -> list[tuple[int, str]]:
        """The numbers and keys of a peer's gets."""
        return list(self._keys.get(peer, {}).items())

    def find_key(self, peer: Peer, get_id: int) -> str | None:
        """The key that a get waits for; None if it does not wait."""
        return self._keys.get(peer, {}).get(get_id)

    def is_waiting(self, key: str, claim: Claim) -> bool:
        """Whether this get waits for the key."""
        return claim in self._claims.get(key, ())

    def clear(self) -> list[Claim]:
        """Forget all; return them."""
        ended = [claim for claims in self._claims.values() for claim in claims]
        self._claims.clear()
        self._keys.clear()
        self._key_chars.clear()
        return ended
