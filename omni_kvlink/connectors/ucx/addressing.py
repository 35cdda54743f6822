"""How the two ends of a UCX connection find each other, and which message is for which receive."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib

from omni_kvlink.errors import WireError

SECRET_NBYTES = 16
_MAGIC = b"kvu1"
_MAX_ADDRESS = 4096
_TAG_FIELDS = struct.Struct("<QQQQ")


def seal(worker: bytes) -> bytes:
    """Return UCX's worker address behind a magic number and a checksum, which it lacks itself."""
    return _MAGIC + zlib.crc32(worker).to_bytes(4, "little") + worker


def unseal(address: bytes) -> bytes:
    """Return the worker address that was given to `seal`.

    Raises:
        WireError: The address is damaged, or not one of `seal`.
    """
    worker = address[8:]
    if not worker or len(worker) > _MAX_ADDRESS or seal(worker) != address:
        raise WireError(f"{len(address)} bytes that are not the address of a UCX transport")
    return worker


class Tags:
    """The 64-bit tags of one connection's messages.

    A tag is a keyed hash of all numbers that identify a range: get id, epoch, start and stop. No
    number is truncated, so none wraps around; two ranges have the same tag with probability 2**-64,
    and nobody without the secret can compute a tag.

    Args:
        secret: 16 bytes that the consumer draws for the connection and sends over the control
            channel.

    Raises:
        ValueError: The secret has another length.
    """

    def __init__(self, secret: bytes):
        if len(secret) != SECRET_NBYTES:
            raise ValueError(f"a secret of {len(secret)} bytes; expected {SECRET_NBYTES}")
        self.secret = secret

    @classmethod
    def new(cls) -> Tags:
        """Draw a secret."""
        return cls(os.urandom(SECRET_NBYTES))

    def of(self, get_id: int, epoch: int, start: int, stop: int) -> int:
        """Return the tag of bytes `start` to `stop` of the payload offered to a get."""
        fields = _TAG_FIELDS.pack(get_id, epoch, start, stop)
        return int.from_bytes(
            hashlib.blake2b(fields, key=self.secret, digest_size=8).digest(), "little"
        )
