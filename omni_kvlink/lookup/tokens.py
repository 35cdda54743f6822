"""Token sequences as bytes, which sort by namespace, then as the tokens do; their index.

An encoded prompt is the 32 bytes of its namespace's digest, then four bytes for each token.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.kv_checks import json_copy

TokenIds: TypeAlias = Sequence[int] | torch.Tensor
SIZE = 4
"""Bytes of a token, big-endian."""
Namespace: TypeAlias = str | bytes | Mapping[str, Any]
"""All that a prompt's cache depends on besides its tokens; the mapping has JSON values."""

DIGEST_SIZE = 32
NO_NAMESPACE = bytes(DIGEST_SIZE)
"""The digest of `""`."""


def digest(namespace: Namespace) -> bytes:
    """SHA-256 of a namespace; `NO_NAMESPACE` for `""`, SchemaError if it is none.

    The hashed bytes begin with the kind of the namespace: text never equals a mapping.
    """
    if isinstance(namespace, str):
        if not namespace:
            return NO_NAMESPACE
        hashed = b"text " + namespace.encode(errors="surrogatepass")
    elif isinstance(namespace, bytes):
        hashed = b"bytes " + namespace
    elif isinstance(namespace, Mapping):
        values = json_copy(dict(namespace), "namespace")
        hashed = b"json " + msgspec.json.encode(values, order="deterministic")
    else:
        kind = type(namespace).__name__
        raise SchemaError(f"namespace: {kind}; wanted str, bytes or a mapping of JSON values")
    return hashlib.sha256(hashed).digest()


def encode(tokens: TokenIds, roi: torch.Tensor | None, namespace: Namespace = "") -> bytes:
    """Encode the tokens, ids from 0 to 2**32 - 1, that `roi` (bool `[tokens]`, all if None) marks.

    SchemaError unless it marks the first ones and no others: the K and V of a token depend on every
    token before it. SchemaError, too, if the namespace is none.
    """
    plain = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else tokens
    array = np.asarray(plain)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise SchemaError(f"tokens: {array.dtype} {list(array.shape)}; wanted integers [tokens]")
    if array.min() < 0 or array.max() >= 2**32:
        raise SchemaError(f"tokens from {array.min()} to {array.max()}; wanted 0 to 2**32 - 1")
    marked = len(array)
    if roi is not None:
        if roi.dtype != torch.bool or tuple(roi.shape) != array.shape:
            raise SchemaError(f"roi: {roi.dtype} {list(roi.shape)}; wanted bool [{len(array)}]")
        marked = int(roi.sum())
        if not marked or not bool(roi[:marked].all()):
            raise SchemaError("roi: it must mark the first tokens, and no others")
    return digest(namespace) + array[:marked].astype(">u4").tobytes()


def count(key: bytes) -> int:
    """The number of tokens in an encoded prompt."""
    return (len(key) - DIGEST_SIZE) // SIZE


def common(a: bytes, b: bytes) -> int:
    """The number of tokens in the longest common prefix of two encoded prompts.

    0 if their namespaces differ.
    """
    if a[:DIGEST_SIZE] != b[:DIGEST_SIZE]:
        return 0
    size = min(count(a), count(b))
    first, second = (np.frombuffer(key, np.uint32, size, DIGEST_SIZE) for key in (a, b))
    differ = np.flatnonzero(first != second)
    return int(differ[0]) if differ.size else size


class PrefixIndex:
    """Encoded prompts in sorted order; the best match is next to the insertion point."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []

    def add(self, key: bytes) -> None:
        """Add a prompt that is not in the index."""
        self._keys.insert(bisect_left(self._keys, key), key)

    def remove(self, key: bytes) -> None:
        """Remove a prompt that is in the index."""
        del self._keys[bisect_left(self._keys, key)]

    def longest(self, key: bytes) -> tuple[int, bytes]:
        """The tokens in the longest common prefix, and a prompt that has it.

        A prompt equal to `key` comes before a longer one. (0, b"") if none of its namespace has the
        first token.
        """
        index = bisect_left(self._keys, key)
        best = (0, b"")
        for other in self._keys[index : index + 1] + self._keys[max(0, index - 1) : index]:
            shared = common(key, other)
            if shared > best[0]:
                best = (shared, other)
        return best
