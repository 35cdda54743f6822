"""Token sequences as bytes: four for each token, big-endian, which sort as the tokens do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from omni_kvlink.errors import SchemaError

TokenIds: TypeAlias = Sequence[int] | torch.Tensor
SIZE = 4
"""Bytes of a token."""


def encode(tokens: TokenIds, roi: torch.Tensor | None) -> bytes:
    """Encode the tokens that `roi` marks.

    Args:
        tokens: ids, one dimension, each from 0 to 2**32 - 1.
        roi: bool `[tokens]`, all if None. It must mark the first ones and no others: the K and V of
            a token depend on every token before it.

    Raises:
        SchemaError: the tokens or the roi are not valid, or none is marked.
    """
    plain = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else tokens
    array = np.asarray(plain)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise SchemaError(f"tokens: {array.dtype} {list(array.shape)}; wanted integers [tokens]")
    if array.min() < 0 or array.max() >= 2**32:
        raise SchemaError(f"tokens from {array.min()} to {array.max()}; wanted 0 to 2**32 - 1")
    marked = len(array) if roi is None else _marked(roi, len(array))
    return array[:marked].astype(">u4").tobytes()


def count(key: bytes) -> int:
    """The number of tokens in an encoded sequence."""
    return len(key) // SIZE


def common(a: bytes, b: bytes) -> int:
    """The number of tokens in the longest common prefix of two encoded sequences."""
    size = min(len(a), len(b)) // SIZE
    first, second = (np.frombuffer(key, np.uint32, size) for key in (a, b))
    differ = np.flatnonzero(first != second)
    return int(differ[0]) if differ.size else size


def _marked(roi: torch.Tensor, tokens: int) -> int:
    if roi.dtype != torch.bool or tuple(roi.shape) != (tokens,):
        raise SchemaError(f"roi: {roi.dtype} {list(roi.shape)}; wanted bool [{tokens}]")
    marked = int(roi.sum())
    if not marked or not bool(roi[:marked].all()):
        raise SchemaError("roi: it must mark the first tokens, and no others")
    return marked
