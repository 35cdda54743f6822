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
from omni_kvlink.payload.views import TensorView, dense, first_tokens, same_bytes

if TYPE_CHECKING:
    from omni_kvlink.payload.manifest import Shard

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
        self,
        cache: NaiveCacheLike,
        *,
        request_id: str,
        metadata: KVMetadata | Mapping[str, Any],
    ) -> KVCacheTransferData:
        """Return the cache as transfer data; `num_layers` may be left out of a metadata dict."""
        blocks = {
            "key_cache": _layers(cache.key_cache, "K"),
            "value_cache": _layers(cache.value_cache, "V"),
        }
        if not isinstance(metadata, KVMetadata):
            metadata = {"num_layers": len(blocks["key_cache"]), **metadata}
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
        memory with `gen` need no comparison.

        Args:
            contexts: by name; "gen" is required.
            request_id: of the bundle.
            image_shape: (height, width) of the image to make, for every branch.
            extra: JSON values, sent with `gen`.
            shard: the heads, under tensor parallelism.

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
                own = self._export_context(context, request_id, about)
                branches[name] = _refer(own, gen)
        return KVCacheBundle(request_id, branches)

    def load_contexts(
        self, bundle: KVCacheBundle, make_cache: Callable[[int], NaiveCacheLike]
    ) -> dict[str, LoadedContext]:
        """Return every context of a bundle; its tensors are shared with the bundle.

        Args:
            bundle: made by `export_contexts`.
            make_cache: makes an empty cache of this many layers, such as `NaiveCache` itself.
        """
        contexts: dict[str, LoadedContext] = {}
        for name in bundle:
            data = bundle[name]
            contexts[name] = {
                "kv_lens": list(data.metadata.kv_lens),
                "ropes": list(data.metadata.ropes),
                "past_key_values": self.load(data, make_cache(data.metadata.num_layers)),
            }
        return contexts

    def _export_context(
        self,
        context: Any,
        request_id: str,
        about: Mapping[str, Any],
    ) -> KVCacheTransferData:
        take = context.__getitem__ if isinstance(context, Mapping) else partial(getattr, context)
        metadata = {**about, "kv_lens": take("kv_lens"), "ropes": take("ropes")}
        cache = take("past_key_values")
        return self.export(cache, request_id=request_id, metadata=metadata)


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
        raise SchemaError(
            f"{name}: the cache has layers {sorted(cache)}, wanted 0…{len(cache) - 1}"
        )
    return [cache[layer] for layer in range(len(cache))]


def _refer(own: KVCacheTransferData, gen: KVCacheTransferData) -> BundleBranch:
    """Return `own`, or a reference to `gen` if all bytes are equal."""
    tokens = own.metadata.seq_len
    if own.is_empty:
        return _with_dtype(own, gen)
    if own.metadata.num_layers != gen.metadata.num_layers or tokens > gen.metadata.seq_len:
        return own
    pairs = zip(own.tensors(), gen.tensors(), strict=True)
    if not all(_starts_with(longer, shorter) for shorter, longer in pairs):
        return own
    if tokens == gen.metadata.seq_len:
        return SameAs(GEN, own.metadata)
    return PrefixOf(GEN, tokens, own.metadata)


def _starts_with(longer: TensorView, shorter: TensorView) -> bool:
    head = first_tokens(longer, shorter.shape[0])
    is_same_memory = (
        isinstance(head, torch.Tensor)
        and isinstance(shorter, torch.Tensor)
        and head.data_ptr() == shorter.data_ptr()
        and head.stride() == shorter.stride()
        and head.shape == shorter.shape
        and head.dtype == shorter.dtype
        and head.device == shorter.device
    )
    return is_same_memory or same_bytes(head, shorter)


def _with_dtype(empty: KVCacheTransferData, gen: KVCacheTransferData) -> KVCacheTransferData:
    """Set the dtype of an empty cache, which has no tensor to take it from."""
    metadata = dataclasses.replace(empty.metadata, dtype=gen.metadata.dtype)
    return KVCacheTransferData(empty.request_id, empty.layer_blocks, [], metadata)
