"""A slot of a producer's memory: a head, a payload, and perhaps a stream's draft behind it."""

from __future__ import annotations

import struct

from omni_kvlink.memory.region import Region

SLOT = 256
"""Bytes of a slot's head; the payload follows, so it keeps the payload's alignment."""
_HEAD = struct.Struct("<8sQQQ")
_MAGIC = b"kvlslot1"


def write_head(slot: Region, epoch: int, nbytes: int, *, committed: bool) -> None:
    """The commit word repeats the epoch; whoever reads a slot compares both with its offer."""
    slot.view()[: _HEAD.size] = _HEAD.pack(_MAGIC, epoch, nbytes, epoch if committed else 0)


def holds(slot: Region, epoch: int, nbytes: int, *, committed: bool) -> bool:
    """Whether a slot holds exactly the payload that was offered, whole or being written."""
    head = bytes(slot.view()[: _HEAD.size])
    whole = _HEAD.pack(_MAGIC, epoch, nbytes, epoch)
    return head == whole or (not committed and head == _HEAD.pack(_MAGIC, epoch, nbytes, 0))
