"""An engine's KV pools as bytes; a prompt's cache in them as a payload of whole blocks."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import vllm

from omni_kvlink import BlockTable, BundleBranch, KVCacheBundle, PagedTensor, TensorTransferData
from omni_kvlink.errors import SchemaError, UnavailableError
from omni_kvlink.integrations.vllm.identity import model_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from omni_kvlink.integrations.vllm.settings import VllmSettings
    from omni_kvlink.integrations.vllm.step import PromptCache
    from omni_kvlink.lowlevel import Manifest

log = logging.getLogger(f"vllm.{__name__}")

HEAD, LAST = "head", "last"
"""The branches: the blocks before that of the prompt's last token, if any; and that block."""


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """What decides how a block's bytes are read; sent with each cache, and equal on both sides."""

    vllm: str  # vLLM's version; it decides the layout inside a block
    model: str  # the name of the weights
    kind: str  # the class of vLLM's KV cache spec
    dtype: str  # torch's name
    block_size: int  # tokens per block
    kv_heads: int  # per layer
    head_size: int  # elements
    block_nbytes: int  # bytes of one block of one layer
    layout: str  # vLLM's name of the pools' layout
    isa: str  # the instruction set for which the CPU attention kernel packs a block
    layers: list[str]  # the layers' names, in order
    revision: str = ""  # of the model
    quantization: str = ""  # of the weights
    rope: str = ""  # the rotary embedding's parameters, as JSON
    compute_dtype: str = ""  # of the model's activations
    cache_dtype: str = ""  # as vLLM's option of that name
    kv_scales: str = ""  # a digest of each layer's, where K and V are quantized


@dataclasses.dataclass(frozen=True)
class Pools:
    """An engine's KV pools: one per layer, uint8 `[num_blocks, block_size, row]`.

    Caches of the versions of vLLM in `compatible_with` are accepted, too.
    """

    format: BlockFormat
    layers: Mapping[str, torch.Tensor]
    compatible_with: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
        settings: VllmSettings,
    ) -> Pools:
        """The pools of an engine.

        Raises:
            UnavailableError: a pool is not in host memory.
            SchemaError: there are windows or states, which are not whole blocks of a prompt, or a
                pool has an unknown layout.
        """
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        kinds = [type(spec).__name__ for spec in specs]
        if kinds != ["FullAttentionSpec"]:
            raise SchemaError(
                f"the engine's cache is {kinds}; this connector moves one group of full attention"
            )
        spec: Any = specs[0]
        layers = byte_pools(
            kv_caches, num_blocks=kv_cache_config.num_blocks, block_size=spec.block_size
        )
        context = vllm_config.compilation_config.static_forward_context
        isas = {str(getattr(context.get(name), "isa", "")) for name in layers}
        format = BlockFormat(
            **model_identity(vllm_config, settings.model),
            vllm=vllm.__version__,
            kind=kinds[0],
            dtype=str(spec.dtype).removeprefix("torch."),
            block_size=spec.block_size,
            kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            block_nbytes=next(iter(layers.values()))[0].numel(),
            layout=str(vllm_config.cache_config.get_resolved_kv_cache_layout()),
            isa=",".join(sorted(isas)),
            layers=list(layers),
        )
        return cls(format, layers, settings.compatible_with)

    def head(self, cache: PromptCache) -> int:
        """The number of blocks before the last token's block."""
        return (cache.tokens - 1) // self.format.block_size

    def split(self, cache: PromptCache) -> dict[str, list[int]]:
        """The cache's block ids by branch; a branch without blocks is left out.

        Raises:
            SchemaError: the cache has fewer blocks than its tokens need.
        """
        head = self.head(cache)
        if len(cache.blocks) <= head:
            raise SchemaError(
                f"{len(cache.blocks)} blocks for {cache.tokens} tokens; {head + 1} are needed"
            )
        parts = {HEAD: cache.blocks[:head], LAST: cache.blocks[head : head + 1]}
        return {name: blocks for name, blocks in parts.items() if blocks}

    def views(self, blocks: Sequence[int]) -> list[PagedTensor]:
        """All rows of these blocks in each layer's pool."""
        size = self.format.block_size
        table = BlockTable.of_blocks(blocks, block_size=size, tokens=len(blocks) * size)
        return [PagedTensor(pool, table, f"layer {name}") for name, pool in self.layers.items()]

    def bundle(self, cache: PromptCache) -> KVCacheBundle:
        """Describe a cache in the pools as a payload: per branch, the rows of whole blocks."""
        metadata = {"format": dataclasses.asdict(self.format), "inputs": cache.inputs}
        branches: dict[str, BundleBranch] = {}
        for name, blocks in self.split(cache).items():
            views = dict(zip(self.layers, self.views(blocks), strict=True))
            branches[name] = TensorTransferData(cache.key, views, metadata)
        return KVCacheBundle(cache.key, branches)

    def _expected(self, theirs: Mapping[str, Any], peer: str) -> dict[str, Any]:
        """This engine's format, with the peer's version of vLLM if the settings accept it."""
        mine, version = dataclasses.asdict(self.format), theirs.get("vllm")
        if version != mine["vllm"] and version in self.compatible_with:
            _warn_once(
                f"{peer} has vLLM {version}, this engine {mine['vllm']}: its caches are read "
                "because compatible_with names it"
            )
            mine["vllm"] = version
        return mine

    def check(self, manifest: Manifest, cache: PromptCache, *, peer: str) -> None:
        """Check that a received cache belongs to the prompt and has this engine's block format.

        Raises:
            SchemaError: it does not; the error gives both values.
        """
        for branch in manifest.branches:
            theirs = branch.extra.get("format")
            if not isinstance(theirs, Mapping):
                raise SchemaError(f"{peer} sent a cache that no vLLM connector made")
            if wrong := _differences(self._expected(theirs, peer), theirs):
                raise SchemaError(f"the blocks of {peer} do not fit this engine: {wrong}")
            if wrong := ", ".join(_other_inputs(cache, branch.extra)):
                key = manifest.request_id
                raise SchemaError(f"{peer} computed {key!r} from another prompt: other {wrong}")
        rows = {
            branch.name: {spec.shape[0] for spec in manifest.tensors_of(branch)}
            for branch in manifest.branches
        }
        size = self.format.block_size
        here = {name: {len(blocks) * size} for name, blocks in self.split(cache).items()}
        trees = [list(branch.tree or ()) for branch in manifest.branches]
        if rows != here or any(tree != self.format.layers for tree in trees):
            raise SchemaError(f"{peer} sent rows {rows}; expected {here} of each layer")


def byte_pools(
    kv_caches: Mapping[str, torch.Tensor], *, num_blocks: int, block_size: int
) -> dict[str, torch.Tensor]:
    """View each layer's pool, `[num_blocks, …]` with any strides, as bytes, without a copy.

    The order of the bytes inside a block is opaque: a row is one of `block_size` equal slices of
    the block, and only whole blocks have a meaning. Of layers that share a pool, the first is
    returned.

    Raises:
        UnavailableError: a pool is not in host memory.
        SchemaError: a block is not one contiguous piece of memory.
    """
    first: dict[tuple[int, int], str] = {}
    for name, cache in kv_caches.items():
        if not cache.is_cpu:
            raise UnavailableError(
                f"layer {name} is on {cache.device}: this connector supports vLLM's CPU backend "
                "only"
            )
        first.setdefault((cache.data_ptr(), cache.stride(0)), name)
    return {
        name: _bytes_of(kv_caches[name], name, num_blocks, block_size) for name in first.values()
    }


def _bytes_of(cache: torch.Tensor, name: str, num_blocks: int, block_size: int) -> torch.Tensor:
    nbytes = size = cache.element_size()
    for stride, length in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if length > 1 and stride * size != nbytes:
            raise SchemaError(
                f"layer {name}: a block with strides {cache.stride()} is not contiguous"
            )
        nbytes *= length
    if cache.shape[0] != num_blocks or nbytes % block_size or cache.stride(0) * size < nbytes:
        raise SchemaError(
            f"layer {name}: a pool {list(cache.shape)} of {num_blocks} blocks "
            f"of {block_size} tokens has an unknown layout"
        )
    flat = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    row, start = nbytes // block_size, int(cache.storage_offset()) * size
    strides = (cache.stride(0) * size, row, 1)
    return flat.as_strided((num_blocks, block_size, row), strides, start)


def _other_inputs(cache: PromptCache, theirs: Mapping[str, Any]) -> list[str]:
    """The names of the inputs that differ; of each only digests are known."""
    found = theirs.get("inputs")
    if not isinstance(found, Mapping):
        return ["inputs, which it does not name"]
    names = sorted({*cache.inputs, *found})
    return [name for name in names if cache.inputs.get(name) != found.get(name)]


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The fields of `mine` that differ, each with both values; "" if none does."""
    return "; ".join(
        f"{name} is {theirs.get(name)!r:.200} there and {value!r:.200} here"
        for name, value in mine.items()
        if theirs.get(name) != value
    )
