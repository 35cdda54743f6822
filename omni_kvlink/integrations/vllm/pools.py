"""An engine's KV pools as bytes; a prompt's cache in them as a payload of whole blocks."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import vllm

from omni_kvlink import BlockTable, BundleBranch, KVCacheBundle, PagedTensor, TensorTransferData
from omni_kvlink.errors import SchemaError, UnavailableError
from omni_kvlink.integrations.vllm.blocks import BlockShape, bytes_of_blocks
from omni_kvlink.integrations.vllm.groups import (
    HEAD,
    LAST,
    NULL_BLOCK,
    CacheGroup,
    CacheGroups,
    present,
    spec_of,
)
from omni_kvlink.integrations.vllm.identity import differences, model_identity
from omni_kvlink.integrations.vllm.ranks import EngineRank, RankPart

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from omni_kvlink.integrations.vllm.settings import VllmSettings
    from omni_kvlink.integrations.vllm.step import Load, PromptCache
    from omni_kvlink.lowlevel import Manifest

log = logging.getLogger(f"vllm.{__name__}")

RELEASED = "the engine sleeps: its KV caches are not registered"
"""Why a cache is neither sent nor loaded between `unregister_kv_caches` and the restoration."""


class LayerPlace(NamedTuple):
    """The place of a layer: its group, and its number among the layers of the group."""

    name: str
    group: int
    number: int


@dataclasses.dataclass(frozen=True)
class GroupFormat:
    """The format of the blocks of one group of layers: how their bytes are read."""

    kind: str  # the class of vLLM's KV cache spec
    dtype: str  # torch's names, with commas: a recurrent state may have several
    block_size: int  # tokens per block
    kv_heads: int  # per layer
    head_size: int  # elements
    block_nbytes: int  # bytes of one block of one layer
    layers: list[str]  # the layers' names, in the order of the model
    window: int = 0  # tokens that a token sees; 0: all
    chunk: int = 0  # tokens
    state: str = ""  # the shapes of a recurrent state
    shape: list[int] = dataclasses.field(default_factory=list)  # of a block: see `BlockShape`


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """The format to read an engine's blocks by; sent with each cache, and equal on both sides."""

    vllm: str  # vLLM's version; it decides the layout inside a block
    model: str  # the name of the weights
    layout: str  # vLLM's name of the pools' layout
    isa: str  # the instruction set for which the CPU attention kernel packs a block
    groups: list[GroupFormat]
    revision: str = ""  # of the model
    quantization: str = ""  # of the weights
    rope: str = ""  # the rotary embedding's parameters, as JSON
    compute_dtype: str = ""  # of the model's activations
    cache_dtype: str = ""  # as vLLM's option of that name
    kv_scales: str = ""  # a digest of each layer's, where K and V are quantized
    draft: str = ""  # the name of the draft model's weights

    def describe(self) -> dict[str, Any]:
        """Its fields as JSON values; `draft` only if there is one."""
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value or name != "draft"
        }


@dataclasses.dataclass(frozen=True)
class Pools:
    """An engine's KV pools: one per layer, uint8 `[num_blocks, rows, row]`.

    `pools` has them by group, and by the layers' names; `layers` all of them in the order of the
    model. Caches of the versions of vLLM in `compatible_with` are accepted, too.
    """

    format: BlockFormat
    groups: CacheGroups
    pools: Sequence[Mapping[str, torch.Tensor]]
    layers: Sequence[LayerPlace]
    compatible_with: tuple[str, ...] = ()
    part: RankPart = dataclasses.field(default_factory=RankPart)

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
            UnavailableError: a pool is neither in host memory nor on a CUDA device.
            SchemaError: a group of caches is of an unknown kind, or a pool has an unknown layout.
        """
        groups = CacheGroups.of(kv_cache_config)
        context = vllm_config.compilation_config.static_forward_context
        order = {name: number for number, name in enumerate(context)}  # as the model computes
        ordered = dict(sorted(kv_caches.items(), key=lambda item: order.get(item[0], len(order))))
        pools = [
            byte_pools(
                {name: cache for name, cache in ordered.items() if name in group.layers},
                num_blocks=kv_cache_config.num_blocks,
                block_size=group.block_size,
            )
            for group in groups.groups
        ]
        isas = {str(getattr(context.get(name), "isa", "")) for name in ordered}
        format = BlockFormat(
            **model_identity(vllm_config, settings.model),
            vllm=vllm.__version__,
            layout=str(vllm_config.cache_config.get_resolved_kv_cache_layout()),
            isa=",".join(sorted(isas)),
            groups=[
                _group_format(group, kv_cache_config, layers, ordered)
                for group, layers in zip(groups.groups, pools, strict=True)
            ],
        )
        layers, part = layer_places(pools, list(ordered)), RankPart(EngineRank.of(vllm_config))
        return cls(format, groups, pools, layers, settings.compatible_with, part)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All pools."""
        return [pool for pools in self.pools for pool in pools.values()]

    def without_tensors(self) -> Pools:
        """The same without a reference to a pool: no cache can be sent or loaded."""
        return dataclasses.replace(self, pools=[{} for _ in self.pools])

    def needed(self, load: Load) -> list[range]:
        """The numbers of the blocks that a load fills, of each group."""
        return self.groups.needed(load.tokens, is_async=load.is_async, local=load.local)

    def block_ids(self, cache: PromptCache, group: int, blocks: range) -> list[int]:
        """The pools' blocks that have these numbers in a cache of a group.

        Raises:
            SchemaError: the cache does not have them.
        """
        table = cache.blocks[self.groups.groups[group].table]
        ids = table[blocks.start : blocks.stop]
        if len(ids) < len(blocks) or NULL_BLOCK in ids:
            raise SchemaError(
                f"{len(table)} blocks for {cache.tokens} tokens; the numbers {blocks.start} to "
                f"{blocks.stop - 1} of group {group} are needed"
            )
        return ids

    def invalid(self, load: Load) -> set[int]:
        """The blocks of a load that has failed, in all groups."""
        return {
            block
            for group, blocks in enumerate(self.needed(load))
            for block in load.blocks[self.groups.groups[group].table][blocks.start : blocks.stop]
        }

    def views(self, group: int, block_ids: Sequence[int]) -> list[PagedTensor]:
        """All rows of these blocks in the pool of each of a group's layers."""
        views = []
        for name, pool in self.pools[group].items():
            size = pool.shape[1]
            tokens = len(block_ids) * size
            table = BlockTable.of_blocks(block_ids, block_size=size, tokens=tokens)
            views.append(PagedTensor(pool, table, f"layer {name}"))
        return views

    def bundle(self, cache: PromptCache) -> KVCacheBundle:
        """Describe a cache in the pools as a payload: per group and part, rows of whole blocks.

        Raises:
            SchemaError: the cache has fewer blocks than its tokens need.
        """
        metadata = {
            "rank": self.part.describe(),
            "format": self.format.describe(),
            "inputs": cache.inputs,
        }
        branches: dict[str, BundleBranch] = {}
        for group, parts in enumerate(self.groups.sent(cache.tokens)):
            for part, planned in parts.items():
                blocks = _present(self.groups.groups[group], cache, planned)
                if not (blocks and self.pools[group]):
                    continue
                views = self.views(group, self.block_ids(cache, group, blocks))
                branches[branch_name(group, part)] = TensorTransferData(
                    cache.key,
                    dict(zip(self.pools[group], views, strict=True)),
                    {**metadata, "blocks": [blocks.start, blocks.stop]},
                )
        return KVCacheBundle(cache.key, branches)

    def received(self, manifest: Manifest) -> list[dict[str, range]]:
        """The numbers of the blocks in a received cache, of each group, by part; see `check`."""
        numbers: list[dict[str, range]] = [{} for _ in self.groups.groups]
        for branch in manifest.branches:
            part, _, group = branch.name.rpartition("-")
            numbers[int(group)][part] = range(*branch.extra["blocks"])
        return numbers

    def _expected(self, remote: Mapping[str, Any], peer: str) -> dict[str, Any]:
        """This engine's format, with the peer's version of vLLM if the settings accept it."""
        expected, version = self.format.describe(), remote.get("vllm")
        if "draft" not in remote:
            expected.pop("draft", None)  # it has the same layers: none of them is a draft model's
        if version != expected["vllm"] and version in self.compatible_with:
            _warn_once(
                f"{peer} has vLLM {version}, this engine {expected['vllm']}: its caches are read "
                "because compatible_with names it"
            )
            expected["vllm"] = version
        return expected

    def check(self, manifest: Manifest, load: Load, *, peer: str) -> None:
        """Check that a received cache belongs to the prompt, and has the blocks that it needs.

        Raises:
            SchemaError: it does not; the error gives both values.
        """
        for branch in manifest.branches:
            remote = branch.extra.get("format")
            if not isinstance(remote, Mapping):
                raise SchemaError(f"{peer} sent a cache that no vLLM connector made")
            if wrong := differences(self.part.describe(), branch.extra.get("rank")):
                raise SchemaError(
                    f"{peer} is another rank, or of another engine, than the one to read from: "
                    f"{wrong}; peer_tp is the tensor-parallel size of the other side"
                )
            if wrong := _other_draft(self.format.describe(), remote):
                raise SchemaError(f"the cache of {peer} is of other layers: {wrong}")
            if wrong := differences(self._expected(remote, peer), remote):
                raise SchemaError(f"the blocks of {peer} do not fit this engine: {wrong}")
            if wrong := _other_inputs(load.inputs, branch.extra.get("inputs")):
                key = manifest.request_id
                raise SchemaError(f"{peer} computed {key!r} from another prompt: other {wrong}")
        self._check_rows(manifest, peer)
        for group, blocks in enumerate(self.needed(load)):
            numbers = {n for part in self.received(manifest)[group].values() for n in part}
            if self.pools[group] and not numbers.issuperset(blocks):
                raise SchemaError(
                    f"{peer} sent the blocks {sorted(numbers)} of group {group}, and {blocks} are "
                    'needed: the last forward pass of its prefill began behind them; set "load": '
                    '"async", or prefill in larger chunks (max_num_batched_tokens)'
                )

    def _check_rows(self, manifest: Manifest, peer: str) -> None:
        """Check that each branch has the rows of the blocks that it names, for each layer."""
        names = {
            branch_name(group, part): group
            for group in range(len(self.pools))
            for part in (HEAD, LAST)
        }
        for branch in manifest.branches:
            blocks = branch.extra.get("blocks")
            if branch.name not in names or not _is_range(blocks):
                raise SchemaError(f"{peer} sent the blocks {blocks!r:.100} as {branch.name!r:.100}")
            pools = self.pools[names[branch.name]]
            expected = [(blocks[1] - blocks[0]) * pool.shape[1] for pool in pools.values()]
            rows = [spec.shape[0] for spec in manifest.tensors_of(branch)]
            if rows != expected or list(branch.tree or ()) != list(pools):
                raise SchemaError(
                    f"{peer} sent rows {rows} of the layers {list(branch.tree or ())}; expected "
                    f"{expected} of {list(pools)}"
                )


def branch_name(group: int, part: str) -> str:
    """The name of a payload's branch: the blocks of one part of a group."""
    return f"{part}-{group}"


def layer_places(
    pools: Sequence[Mapping[str, torch.Tensor]], order: Sequence[str]
) -> list[LayerPlace]:
    """The layers of all groups, in the order of the model."""
    by_name = {
        name: LayerPlace(name, group, index)
        for group, layers in enumerate(pools)
        for index, name in enumerate(layers)
    }
    return [by_name[name] for name in order if name in by_name]


def byte_pools(
    kv_caches: Mapping[str, torch.Tensor], *, num_blocks: int, block_size: int
) -> dict[str, torch.Tensor]:
    """View each layer's pool, `[num_blocks, …]` with any strides, as bytes, without a copy.

    The order of the bytes inside a block is opaque: a row is one of `block_size` equal slices of
    the block, or all of it, and only whole blocks have a meaning. Of layers that share a pool, the
    first is returned.

    Raises:
        UnavailableError: a pool is neither in host memory nor on a CUDA device.
        SchemaError: a block is neither contiguous nor equal pieces.
    """
    first: dict[tuple[int, int], str] = {}
    for name, cache in kv_caches.items():
        if cache.device.type not in ("cpu", "cuda"):
            raise UnavailableError(
                f"layer {name} is on {cache.device}: this connector supports CUDA devices and "
                "vLLM's CPU backend"
            )
        first.setdefault((cache.data_ptr(), cache.stride(0)), name)
    return {
        name: bytes_of_blocks(kv_caches[name], name, num_blocks=num_blocks, block_size=block_size)
        for name in first.values()
    }


def _present(group: CacheGroup, cache: PromptCache, blocks: range) -> range:
    """The blocks of a part that a producer has; only the first ones of a window may be gone."""
    table = cache.blocks[group.table]
    tail = present(table, blocks)
    if tail != blocks and (group.is_whole or group.is_state or not tail):
        raise SchemaError(
            f"{len(table)} blocks of a {group.kind}; the numbers {blocks.start} to "
            f"{blocks.stop - 1} are needed"
        )
    return tail


def _group_format(
    group: CacheGroup,
    config: KVCacheConfig,
    layers: Mapping[str, torch.Tensor],
    caches: Mapping[str, torch.Tensor],
) -> GroupFormat:
    """The format of a group's blocks; `layers` has its pools as bytes, `caches` all as vLLM's.

    Raises:
        SchemaError: the blocks of two layers have different shapes.
    """
    specs = config.kv_cache_groups[group.table].kv_cache_spec
    spec = spec_of(specs, next(iter(group.layers), ""))
    shapes = {
        BlockShape.of(spec_of(specs, name), caches[name], config.num_blocks, name)
        for name in group.layers
        if name in caches
    }
    if len(shapes) > 1:
        raise SchemaError(f"the layers of a group have blocks of several shapes: {shapes}")
    dtypes = spec.dtypes if group.is_state else (spec.dtype,)
    return GroupFormat(
        kind=group.kind,
        dtype=",".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
        block_size=group.block_size,
        kv_heads=0 if group.is_state else spec.num_kv_heads,
        head_size=0 if group.is_state else spec.head_size,
        block_nbytes=block_nbytes(layers),
        layers=list(layers),
        window=group.window,
        chunk=group.chunk,
        state=str(spec.shapes) if group.is_state else "",
        shape=[dim for shape in shapes for dim in dataclasses.astuple(shape)],
    )


def block_nbytes(layers: Mapping[str, torch.Tensor]) -> int:
    """Bytes of one block of one layer."""
    return next((pool[0].numel() for pool in layers.values()), 0)


def _other_inputs(expected: Mapping[str, str], actual: object) -> str:
    """The names of the inputs that differ; of each only digests are known."""
    if not isinstance(actual, Mapping):
        return "inputs, which it does not name"
    names = sorted({*expected, *actual})
    return ", ".join(name for name in names if expected.get(name) != actual.get(name))


def _other_draft(local: Mapping[str, Any], remote: Mapping[str, Any]) -> str:
    """The layers of a draft model that one side alone has, and the cure; "" if there are none."""
    layers = _layers_of(local) ^ _layers_of(remote)
    drafts = [str(format.get("draft") or "no model") for format in (remote, local)]
    if not layers or drafts == ["no model"] * 2:
        return ""
    return (
        f"it drafts with {drafts[0]:.100}, this engine with {drafts[1]:.100}, and only one has "
        f"{', '.join(sorted(layers)):.200}; start both engines with the same --speculative-config, "
        "or both without a draft model"
    )


def _layers_of(format: Mapping[str, Any]) -> set[str]:
    """The names of the layers in a format, which a peer may have sent."""
    groups = format.get("groups")
    entries = groups if isinstance(groups, list) else []
    layers = [group.get("layers") for group in entries if isinstance(group, Mapping)]
    return {str(name) for names in layers if isinstance(names, list) for name in names}


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _is_range(blocks: Any) -> TypeGuard[list[int]]:
    """Whether a producer's numbers of blocks are a range that is not empty."""
    is_pair = isinstance(blocks, list) and [type(number) for number in blocks] == [int, int]
    return is_pair and 0 <= blocks[0] < blocks[1]
