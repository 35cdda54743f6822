"""BAGEL's NaiveCache, and the three contexts of a request as one bundle.

A NaiveCache has `key_cache` and `value_cache`: dicts `{layer: tensor or None}` as in the official
code (ByteDance-Seed/Bagel), or lists as in vLLM-Omni; tensors are `[tokens, kv_heads, head_dim]`.
A context has `kv_lens`, `ropes` and `past_key_values`, as attributes or as dict entries.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

import torch

from omni_kvlink.adapters.base import CacheAdapter
from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.bundle import BundleBranch, KVCacheBundle, PrefixOf, SameAs
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata
from omni_kvlink.payload.tensor_memory import same_place
from omni_kvlink.payload.views import TensorView, dense, first_tokens, same_bytes

if TYPE_CHECKING:
    from omni_kvlink.payload.branches import Shard

GEN = "gen"


class NaiveCacheLike(Protocol):
    """Any object with BAGEL's two attributes, each a dict or a list by layer."""

    key_cache: Any
    value_cache: Any


C = TypeVar("C", bound=NaiveCacheLike)


class LoadedContext(TypedDict):
    """One context in the form of the official code."""

    kv_lens: list[int]
    ropes: list[int]
    past_key_values: Any


class BagelAdapter(CacheAdapter[NaiveCacheLike]):
    """Converts a NaiveCache to and from transfer data, contexts to and from a bundle."""

    def export(
        self, cache: NaiveCacheLike, *, request_id: str, metadata: KVMetadata | Mapping[str, Any]
    ) -> KVCacheTransferData:
        """Return the cache as transfer data; `num_layers` may be left out of a metadata dict."""
        keys, values = _layers(cache.key_cache, "K"), _layers(cache.value_cache, "V")
        if not isinstance(metadata, KVMetadata):
            metadata = {"num_layers": len(keys), **metadata}
        blocks = {"key_cache": keys, "value_cache": values}
        return KVCacheTransferData(request_id, blocks, [], metadata)

    def load(self, data: KVCacheTransferData, into: C) -> C:
        """Fill a NaiveCache; empty branches leave every layer None, paged tensors become dense."""
        for name in ("key_cache", "value_cache"):
            layers, target = data.layer_blocks[name], getattr(into, name)
            if len(target) != len(layers):
                raise SchemaError(
                    f"{name} of the target has {len(target)} layers, the data has {len(layers)}"
                )
            for layer, view in enumerate(layers):
                target[layer] = None if view is None else dense(view)
        return into

    def export_contexts(
        self,
        contexts: Mapping[str, Any],
        *,
        request_id: str,
        image_shape: tuple[int, int] | None = None,
        extra: dict[str, Any] | None = None,
        shard: Shard | None = None,
    ) -> KVCacheBundle:
        """Return all contexts of a request as one bundle, without sending a byte twice.

        A context whose bytes are the first ones of `gen` (BAGEL's cfg_text always, its cfg_img for
        plain text-to-image) is sent as a reference. The bytes are compared; tensors that share
        memory with `gen` need no comparison. `extra`, JSON values, is sent with `gen`; the
        `image_shape` (height, width), and under tensor parallelism the `shard`, with every branch.

        Raises:
            SchemaError: a context is incomplete, or "gen" is missing.
        """
        if GEN not in contexts:
            raise SchemaError(f"no context {GEN!r} among {', '.join(contexts) or 'none'}")
        about = {"image_shape": image_shape, "shard": shard}
        gen = self._export_context(contexts[GEN], request_id, {**about, "extra": extra or {}})
        branches: dict[str, BundleBranch] = {GEN: gen}
        for name, context in contexts.items():
            if name != GEN:
                data = self._export_context(context, request_id, about)
                branches[name] = _refer(data, gen)
        return KVCacheBundle(request_id, branches)

    def load_contexts(
        self, bundle: KVCacheBundle, make_cache: Callable[[int], NaiveCacheLike]
    ) -> dict[str, LoadedContext]:
        """Return every context of a bundle; its tensors are shared with the bundle.

        `make_cache` makes an empty cache of so many layers, such as `NaiveCache` itself.
        """
        contexts: dict[str, LoadedContext] = {}
        for name in bundle:
            data, metadata = bundle[name], bundle[name].metadata
            cache = self.load(data, make_cache(metadata.num_layers))
            lens, ropes = list(metadata.kv_lens), list(metadata.ropes)
            contexts[name] = {"kv_lens": lens, "ropes": ropes, "past_key_values": cache}
        return contexts

    def _export_context(
        self, context: Any, request_id: str, about: Mapping[str, Any]
    ) -> KVCacheTransferData:
        take = context.__getitem__ if isinstance(context, Mapping) else partial(getattr, context)
        metadata = {**about, "kv_lens": take("kv_lens"), "ropes": take("ropes")}
        return self.export(take("past_key_values"), request_id=request_id, metadata=metadata)


def pack_generator(generator: torch.Generator) -> str:
    """Encode a CPU generator's state as text, for `extra`.

    The initial noise is drawn after the images of the prompt were encoded, which draws numbers,
    too: a seed alone does not determine it.
    """
    return base64.b64encode(bytes(generator.get_state().tolist())).decode()


def unpack_generator(text: str) -> torch.Generator:
    """Return a CPU generator with the state that `pack_generator` encoded."""
    state = torch.tensor(list(base64.b64decode(text, validate=True)), dtype=torch.uint8)
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _layers(cache: Any, name: str) -> list[torch.Tensor | None]:
    """Return a dict's layers in order, a list's as they are."""
    if not isinstance(cache, Mapping):
        return list(cache)
    if set(cache) != set(range(len(cache))):
        raise SchemaError(f"{name}: the cache has layers {sorted(cache)}, not 0…{len(cache) - 1}")
    return [cache[layer] for layer in range(len(cache))]


def _refer(data: KVCacheTransferData, gen: KVCacheTransferData) -> BundleBranch:
    """Return `own`, or a reference to `gen` if all bytes are equal."""
    tokens = data.metadata.seq_len
    if data.is_empty:  # it has no tensor to take the dtype from
        metadata = dataclasses.replace(data.metadata, dtype=gen.metadata.dtype)
        return KVCacheTransferData(data.request_id, data.layer_blocks, [], metadata)
    if data.metadata.num_layers != gen.metadata.num_layers or tokens > gen.metadata.seq_len:
        return data
    pairs = zip(data.tensors(), gen.tensors(), strict=True)
    if not all(_starts_with(longer, shorter) for shorter, longer in pairs):
        return data
    if tokens == gen.metadata.seq_len:
        return SameAs(GEN, data.metadata)
    return PrefixOf(GEN, tokens, data.metadata)


def _starts_with(longer: TensorView, shorter: TensorView) -> bool:
    head = first_tokens(longer, shorter.shape[0])
    if isinstance(head, torch.Tensor) and isinstance(shorter, torch.Tensor):
        return same_place(head, shorter) or same_bytes(head, shorter)
    return same_bytes(head, shorter)
