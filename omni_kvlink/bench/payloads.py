"""Caches of random bytes to send, and what must arrive, computed without the library."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from omni_kvlink.bench.setups import BLOCK, Shape
from omni_kvlink.payload.bundle import BundleBranch, KVCacheBundle, PrefixOf, SameAs
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.payload.views import TensorView, dense

if TYPE_CHECKING:
    from collections.abc import Iterator


Rows: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
"""The bytes of one tensor, a row a token; may be strided."""

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Sources: TypeAlias = Literal["contiguous", "strided", "paged"]
"""The memory of tensors: dense; K and V of a token side by side; pool blocks in random order."""

BRANCH_NAMES = ("gen", "cfg_text", "cfg_img")


@dataclasses.dataclass(frozen=True)
class Sample:
    """A cache and the raw bytes of its tensors, layer by layer, K before V."""

    cache: KVCacheTransferData
    shape: Shape
    rows: list[Rows]

    def expected(
        self, *, tokens: int | None = None, metadata: KVMetadata | None = None
    ) -> dict[str, Any]:
        """The result of `found_in` that a reader of the first `tokens` tokens must have."""
        tokens = self.shape.tokens if tokens is None else tokens
        label = f"{self.shape.dtype} {[tokens, *self.shape.row]}"
        return {
            **_metadata_fields(metadata or self.cache.metadata),
            "dtype": self.shape.dtype,
            "block_ids": list(self.cache.block_ids) if metadata is None else [],
            "digests": [_sha256(label, np.ascontiguousarray(r[:tokens])) for r in self.rows],
        }


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as `bfloat16`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def make_sample(
    request_id: str,
    shape: Shape,
    rng: np.random.Generator,
    *,
    sources: Sources = "contiguous",
    block_ids: tuple[int, ...] = (),
) -> Sample:
    """Make a cache of random bytes, NaNs included; a paged one has block ids of its own."""
    rows, tensors = list[Rows](), dict[str, list[torch.Tensor]]()
    count, block_ids_of_pool, slots = _blocks(shape.tokens, rng)
    sizes = (count, BLOCK) if sources == "paged" else (shape.tokens,)
    for _ in range(shape.layers):
        if sources == "strided":
            both = _random_bytes(rng, shape.tokens, 2 * shape.row_nbytes)
            memory = [both[:, : shape.row_nbytes], both[:, shape.row_nbytes :]]
        else:
            memory = [_random_bytes(rng, math.prod(sizes), shape.row_nbytes) for _ in shape.parts]
        for part, part_rows in zip(shape.parts, memory, strict=False):
            rows.append(part_rows[slots] if sources == "paged" else part_rows)
            tensor = torch.from_numpy(part_rows).view(torch_dtype(shape.dtype))
            tensors.setdefault(part, []).append(tensor.view(*sizes, *shape.row))
    metadata = make_metadata(shape, shape.tokens, rng)
    if sources != "paged":
        return Sample(KVCacheTransferData(request_id, tensors, block_ids, metadata), shape, rows)
    keys, *values = tensors.values()
    cache = KVCacheTransferData.from_paged(
        request_id,
        keys,
        values[0] if values else None,
        block_size=BLOCK,
        metadata=metadata,
        block_ids=block_ids_of_pool.tolist(),
    )
    return Sample(cache, shape, rows)


def make_bundle(sample: Sample, branches: int, rng: np.random.Generator) -> KVCacheBundle:
    """Make a bundle whose first branch has bytes; the others are in turn half of it and all."""
    first = BRANCH_NAMES[0]
    contents: dict[str, BundleBranch] = {first: sample.cache}
    for index in range(1, branches):
        name = BRANCH_NAMES[index] if index < len(BRANCH_NAMES) else f"branch_{index}"
        tokens = max(1, sample.shape.tokens // 2)
        if index % 2:
            contents[name] = PrefixOf(first, tokens, make_metadata(sample.shape, tokens, rng))
        else:
            contents[name] = SameAs(first)
    return KVCacheBundle(sample.cache.request_id, contents)


def empty_cache(request_id: str, shape: Shape) -> KVCacheTransferData:
    """Make a cache without tokens, as an unconditional branch has it."""
    metadata = KVMetadata((0,), (0,), shape.layers, layout=shape.layout)
    return KVCacheTransferData(
        request_id, {part: [None] * shape.layers for part in shape.parts}, (), metadata
    )


def found_in(data: KVCacheTransferData | TensorTransferData) -> dict[str, Any]:
    """The metadata and structure of a payload, and the SHA-256 of each tensor."""
    if isinstance(data, TensorTransferData):
        leaves = dict(_leaves(data.tree, ""))
        digests = [_tensor_sha256(dense(tensor).contiguous()) for tensor in leaves.values()]
        return {"metadata": data.metadata, "paths": list(leaves), "digests": digests}
    layers = zip(*data.layer_blocks.values(), strict=True)
    tensors = [dense(part) for layer in layers for part in layer if part is not None]
    return {
        **_metadata_fields(data.metadata),
        "dtype": data.metadata.dtype,
        "block_ids": list(data.block_ids),
        "digests": list(map(_tensor_sha256, tensors)),
    }


def make_tensor_sample(
    request_id: str, shape: Shape, rng: np.random.Generator, *, sources: Sources
) -> tuple[TensorTransferData, dict[str, Any]]:
    """Make nested tensors of one dtype, and what a reader must find, see `found_in`."""
    dtype, digests = torch_dtype(shape.dtype), list[str]()

    def leaf(*sizes: int) -> TensorView:
        rows, row = (sizes[0], math.prod(sizes[1:])) if sizes else (1, 1)
        row_nbytes = row * dtype.itemsize
        is_paged = sources == "paged" and len(sizes) > 1 and rows * row > 0
        is_strided = sources == "strided" and len(sizes) > 1
        count, ids, slots = _blocks(rows, rng)
        length = count * BLOCK if is_paged else rows
        pool = _random_bytes(rng, length, row_nbytes * (1 + is_strided))
        if dtype == torch.bool:
            pool &= 1
        content = np.ascontiguousarray(pool[slots if is_paged else slice(None), :row_nbytes])
        digests.append(_sha256(f"{shape.dtype} {list(sizes)}", content))
        tensor = torch.from_numpy(pool).view(-1).view(dtype)
        if is_paged:
            paged_pool = tensor.view(count, BLOCK, *sizes[1:])
            block_table = BlockTable.of_blocks(ids.tolist(), tokens=rows, block_size=BLOCK)
            return PagedTensor(paged_pool, block_table)
        wide = tensor.view(rows, -1) if tensor.numel() else tensor.view(rows, row)
        return wide[:, :row].view(rows, *sizes[1:]) if len(sizes) > 1 else tensor.view(sizes)

    tokens, dim = shape.tokens, shape.head_dim
    tree = {
        "hidden": [leaf(tokens, dim), {"mask": leaf(tokens), "é/ ": [leaf(tokens, 2, 3)]}],
        "scalar": leaf(),
        "no elements": [leaf(0, 3), leaf(tokens, 0)],
        "deep": {"a": {"b": [[leaf(5, 7)], leaf(1)]}},
    }
    paths = ["hidden[0]", "hidden[1].mask", "hidden[1].é/ [0]", "scalar", "no elements[0]"]
    paths += ["no elements[1]", "deep.a.b[0][0]", "deep.a.b[1]"]
    metadata = {"salt": int(rng.integers(0, 1 << 40)), "nested": {"list": [1, 0.5, None, "é"]}}
    expected = {"metadata": metadata, "paths": paths, "digests": digests}
    return TensorTransferData(request_id, tree, metadata), expected


def _leaves(node: Any, path: str) -> Iterator[tuple[str, TensorView]]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _leaves(child, f"{path}.{key}" if path else key)
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _leaves(child, f"{path}[{index}]")
    else:
        yield path, node


def bytes_of(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of a contiguous tensor, not copied."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _blocks(tokens: int, rng: np.random.Generator) -> tuple[int, Numbers, Numbers]:
    """The blocks of a pool, an eighth of which is unused, the ids of those used, and the slots."""
    used = -(-tokens // BLOCK)
    count = used + used // 8 + 1
    ids = rng.permutation(count)[:used]
    return count, ids, (ids[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[:tokens]


def _random_bytes(rng: np.random.Generator, rows: int, row: int) -> Rows:
    numbers = rng.integers(0, 1 << 64, size=-(-rows * row // 8), dtype=np.uint64)
    return numbers.view(np.uint8)[: rows * row].reshape(rows, row)


def make_metadata(shape: Shape, tokens: int, rng: np.random.Generator) -> KVMetadata:
    """Make metadata with random fields for a number of tokens."""
    return KVMetadata(
        kv_lens=(tokens,),
        ropes=(int(rng.integers(0, 1 << 20)),),
        num_layers=shape.layers,
        layout=shape.layout,
        extra={"salt": int(rng.integers(0, 1 << 40))},
    )


def _metadata_fields(metadata: KVMetadata) -> dict[str, Any]:
    values = metadata.to_dict()
    names = ("kv_lens", "ropes", "num_layers", "seq_len", "layout", "extra")
    return {name: values[name] for name in names}


def _tensor_sha256(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _sha256(f"{dtype} {list(tensor.shape)}", bytes_of(tensor))


def _sha256(label: str, data: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    digest = hashlib.sha256(label.encode())
    digest.update(data.data)
    return digest.hexdigest()
