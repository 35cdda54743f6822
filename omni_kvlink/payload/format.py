"""Versions, sizes and limits of the payload format; docs/wire.md describes it."""

from __future__ import annotations

VERSION = (1, 1)
"""The newest version that this library writes."""
KV_VERSION = (1, 0)
"""The version of a payload without a `TensorTransferData`, which every 1.x reads."""

ALIGN = 256
"""Every tensor, and the data section itself, starts on a multiple of this many bytes."""
DIGEST_CHUNK = 1 << 20
"""Each started MiB of a tensor has a CRC-32C, so that a mismatch can be localised."""

MAX_HEADER = 1 << 20
MAX_ID = 1024
"""Characters of a request id."""
MAX_TENSORS = 4096
MAX_BRANCHES = 256
MAX_LAYERS = 4096
MAX_RANK = 8
MAX_DEPTH = 32
"""Levels of dicts and lists in `extra`, in metadata and in a tree of tensors."""
MAX_MARKS = {mark: n * MAX_TENSORS for mark, n in ((b'"', 28), (b"{", 3), (b"[", 5), (b",", 40))}
"""The number of times that a character may occur in a header: bounds what decoding allocates."""
