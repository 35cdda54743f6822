"""Where a plane can be reached, in a form that survives being handled by others."""

from __future__ import annotations

import zlib

from omni_kvlink.errors import WireError

_MAGIC = b"kvu1"
_LONGEST = 4096


def seal(worker: bytes) -> bytes:
    """UCX's worker address behind a magic number and a checksum: UCX's own bytes have neither."""
    return _MAGIC + zlib.crc32(worker).to_bytes(4, "little") + worker


def unseal(address: bytes) -> bytes:
    """Raises WireError on anything that `seal` did not make."""
    worker = address[8:]
    if not worker or len(worker) > _LONGEST or seal(worker) != address:
        raise WireError(f"{len(address)} bytes that are no address of a UCX plane")
    return worker
