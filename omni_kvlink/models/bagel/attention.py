"""Attention of rows over keys and values: by SDPA, or block by block with an online softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.models.bagel.cache import Layer

_QUERIES_AT_ONCE = 512
"""The queries of `PartialAttention` whose scores are in memory at once."""


class DenseAttention(Protocol):
    """A function that computes as `attend` does."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        """Attention of q [n, heads, dim] over k, v [m, kv_heads, dim]: [n, heads * dim]."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention of q [n, heads, dim] over k, v [m, kv_heads, dim]: [n, heads * dim].

    The queries are the last n of the m tokens; a causal query attends to itself and all before it.
    """
    n, m = q.shape[0], k.shape[0]
    groups = q.shape[1] // k.shape[1]
    # Repeated by hand, because older torch has no grouped attention.
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mask = None
    if causal and 1 < n < m:
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    # a single query sees all keys: torch's `is_causal` would let it see the first one alone
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal and 1 < n == m
    )
    return out[0].transpose(0, 1).reshape(n, -1)


def attend_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merges: Sequence[Callable[[Tensor, Tensor], Layer]],
    dense: DenseAttention = attend,
    *,
    seq_lens: Sequence[int] | None = None,
    causal: bool = False,
) -> Tensor:
    """Run `dense` for each of several sequences over its own past.

    The sequences are of `seq_lens`, one after the other: q [n, heads, dim] to [n, heads * dim]. If
    None, they are equally long, along dimension 1: [n, batch, heads, dim] to [n, batch, …].
    """
    if seq_lens is None:
        parts = zip(*(rows.unbind(1) for rows in (q, k, v)), merges, strict=True)
    else:
        parts = zip(*(rows.split(list(seq_lens)) for rows in (q, k, v)), merges, strict=True)
    out = [dense(q, *merge(k, v), causal=causal) for q, k, v, merge in parts]
    if seq_lens is None:
        return torch.stack(out, dim=1)
    return out[0] if len(out) == 1 else torch.cat(out)


class PartialAttention:
    """Attention of q [n, heads, dim] over blocks of K and V that `add` is given one by one.

    Keeps the softmax over the keys so far as a mean of their values and the log of the sum of their
    weights, in float32. The order of the blocks changes the result by rounding only.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q.float() * q.shape[-1] ** -0.5
        self._mean = torch.zeros_like(self._q)
        self._log_sum = self._q.new_full(q.shape[:2], float("-inf"))  # [n, heads]

    def add(self, k: Tensor, v: Tensor) -> None:
        """Attend to k, v [m, kv_heads, dim], too; none of them is masked."""
        if not len(k):
            return
        groups = self._q.shape[1] // k.shape[1]
        k, v = (t.float().repeat_interleave(groups, dim=1) for t in (k, v))
        for start in range(0, len(self._q), _QUERIES_AT_ONCE):
            part = slice(start, start + _QUERIES_AT_ONCE)
            scores = torch.einsum("qhd,khd->qhk", self._q[part], k)
            log_sum = scores.logsumexp(-1)
            mean = torch.einsum("qhk,khd->qhd", (scores - log_sum[..., None]).exp(), v)
            total = torch.logaddexp(self._log_sum[part], log_sum)
            # neither exponent is above 0; before the first keys the old weight is exp(-inf), 0
            old, new = ((log - total).exp()[..., None] for log in (self._log_sum[part], log_sum))
            self._mean[part] = self._mean[part] * old + mean * new
            self._log_sum[part] = total

    def result(self, dtype: torch.dtype) -> Tensor:
        """The rows [n, heads * dim] so far; at least one key was added."""
        return self._mean.to(dtype).flatten(1)
