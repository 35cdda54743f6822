"""`Tags`: which message belongs to which receive."""

from __future__ import annotations

import hashlib
import os
import struct

SECRET = 16
"""Bytes of a secret."""
_NUMBERS = struct.Struct("<QQQQ")


class Tags:
    """The 64-bit tags of one connection.

    A tag is a keyed hash of every number that names a piece: the want, the epoch, where the piece
    starts and stops. No number is cut to fit, so none wraps: an epoch never comes twice, and two
    pieces share a tag with a chance of 2**-64. Who does not have the secret can name no piece.

    Args:
        secret: drawn by the consumer for one connection and told over the control channel.
    """

    def __init__(self, secret: bytes):
        if len(secret) != SECRET:
            raise ValueError(f"a secret of {len(secret)} bytes; wanted {SECRET}")
        self.secret = secret

    @classmethod
    def new(cls) -> Tags:
        return cls(os.urandom(SECRET))

    def of(self, get_id: int, epoch: int, start: int, stop: int) -> int:
        """The tag of bytes `start…stop` of what was offered for `get_id` in `epoch`."""
        numbers = _NUMBERS.pack(get_id, epoch, start, stop)
        return int.from_bytes(
            hashlib.blake2b(numbers, key=self.secret, digest_size=8).digest(), "little"
        )
