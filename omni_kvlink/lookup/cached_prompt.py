"""A prompt's K and V and hidden states as one payload: what a store keeps, and an answer may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.link import verify_part
from omni_kvlink.lookup.match import Match
from omni_kvlink.lookup.messages import Found
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata
from omni_kvlink.payload.tensor_data import TensorTransferData

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from omni_kvlink.link import Payload, Received
    from omni_kvlink.payload.bundle import BundleBranch
    from omni_kvlink.payload.header import TensorSpec

KV, HIDDEN = "kv", "hidden"


def metadata(tokens: int, layers: int, extra: Mapping[str, Any] | None) -> KVMetadata:
    """The metadata of K and V of the first tokens of a prompt."""
    return KVMetadata((tokens,), (tokens,), layers, extra=dict(extra or {}))


def cache_payload(
    key: str, cache: KVCacheTransferData, hidden: torch.Tensor | None
) -> KVCacheBundle:
    """K and V, and the hidden states of the last tokens, to be put; it shares these tensors."""
    branches: dict[str, BundleBranch]
    branches = {KV: KVCacheTransferData(key, cache.layer_blocks, (), cache.metadata)}
    if hidden is not None:
        branches[HIDDEN] = TensorTransferData(key, {HIDDEN: hidden})
    return KVCacheBundle(key, branches)


def read_cache(data: Payload) -> tuple[KVCacheTransferData, torch.Tensor | None]:
    """K and V, and the hidden states `[n, dim]` or None; SchemaError if it has no K and V."""
    cache = data.branches.get(KV) if isinstance(data, KVCacheBundle) else None
    if not isinstance(data, KVCacheBundle) or not isinstance(cache, KVCacheTransferData):
        raise SchemaError(f"payload {data.request_id!r} is no K and V of a prompt")
    branch = data.tensor_data.get(HIDDEN)
    hidden = None if branch is None else branch.tree.get(HIDDEN)
    if branch is not None and not (isinstance(hidden, torch.Tensor) and hidden.dim() == 2):
        raise SchemaError(f"payload {data.request_id!r} has no hidden states [n, dim]: {branch!r}")
    return cache, hidden if isinstance(hidden, torch.Tensor) else None


def read_match(
    received: Received, hit: Found | None, requested: int, *, verify: bool = False
) -> Match:
    """Return a match: views of the first tokens of a received payload, which the match releases.

    With None they are all that it has. With `verify`, the bytes of these tokens are compared with
    their digests, and no others. After an error the payload is released.

    Raises:
        SchemaError: the payload is not what was found.
        IntegrityError: a byte is wrong; the producer drops the entry.
    """
    try:
        cache, hidden = read_cache(received.data)
        rows = 0 if hidden is None else len(hidden)
        hit = hit or Found(cache.metadata.seq_len, row=rows - 1 if rows else None)
        hit.check(requested)
        tokens, row = hit.tokens, hit.row
        if not 0 < tokens <= cache.metadata.seq_len or (row is not None and row >= rows):
            raise SchemaError(f"{cache!r} with {rows} hidden states is not {hit}")
        if verify:
            verify_part(received, _specs(received, tokens, with_hidden=row is not None))
    except BaseException:
        received.release_unread()
        raise
    if tokens < cache.metadata.seq_len:
        about = metadata(tokens, cache.metadata.num_layers, cache.metadata.extra)
        cache = cache.first_tokens(tokens, about)
    state = None if row is None or hidden is None else hidden[row : row + 1]
    return Match(requested, cache, state, received)


def _specs(received: Received, tokens: int, *, with_hidden: bool) -> Iterator[TensorSpec]:
    """The tensors of a payload as far as they are of the first tokens."""
    for spec in received.manifest.tensors:
        if spec.name.startswith(f"{KV}."):
            yield spec.leading(tokens)
        elif with_hidden:
            yield spec
