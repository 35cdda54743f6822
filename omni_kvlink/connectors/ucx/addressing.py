"""Addresses of the two ends of a UCX connection, and tags of its messages."""

from __future__ import annotations

import hashlib
import struct
import zlib

from omni_kvlink.errors import WireError

SECRET_NBYTES = 16
_MAGIC = b"kvu1"
_MAX_ADDRESS = 4096
_END = b"\xff" * 512  # "the last" and "no longer than 63 bytes", at any place of the format
_TAG_FIELDS = struct.Struct("<QQQQ")


def seal(worker: bytes) -> bytes:
    """Return UCX's worker address behind a magic number and a checksum, which it lacks itself."""
    return _MAGIC + zlib.crc32(worker).to_bytes(4, "little") + worker


def unseal(address: bytes, own: bytes) -> bytes:
    """Return the worker address that was given to `seal`, for UCX to parse.

    UCX trusts what it parses: it aborts at a version of the format that it does not have, and reads
    on where an address is cut off. WireError is raised if the address is damaged, or begins
    otherwise than `own`, this side's; bytes that say that it ends are appended. What a peer forges
    within an address may still end the process: that is a part of `trusted_network=True`.
    """
    worker = address[8:]
    if not worker or len(worker) > _MAX_ADDRESS or seal(worker) != address:
        raise WireError(f"{len(address)} bytes that are not the address of a UCX transport")
    if worker[0] != own[8]:
        raise WireError(
            f"an address of UCX in format {worker[0]:#x}, this side's is {own[8]:#x}; use the "
            "same version of UCX, and of UCX_ADDRESS_VERSION, on both sides"
        )
    return worker + _END


def tag_of(secret: bytes, get_id: int, epoch: int, start: int, stop: int) -> int:
    """Return the 64-bit tag of the message with bytes `start` to `stop` of a get's payload.

    The tag is a hash of these numbers, keyed by the secret that the consumer draws for the
    connection and sends over the control channel. No number is truncated, so none wraps around; two
    ranges have the same tag with probability 2**-64, and only who has the secret can compute it.
    """
    fields = _TAG_FIELDS.pack(get_id, epoch, start, stop)
    digest = hashlib.blake2b(fields, key=secret, digest_size=8).digest()
    return int.from_bytes(digest, "little")
