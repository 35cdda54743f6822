"""`check_copier`: compare a copier with a reference that reads memory and shares no code."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from omni_kvlink._native.crc32c import numpy_crc32c
from omni_kvlink.errors import IntegrityError, SchemaError
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.dtypes import KV_DTYPES
from omni_kvlink.payload.manifest import Layout as PayloadLayout
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.payload.tensor_memory import tensor_view
from omni_kvlink.payload.views import TensorView, dense
from omni_kvlink.testing.caches import hash_tensors, random_tensor
from omni_kvlink.testing.rig import expect, naming

if TYPE_CHECKING:
    from omni_kvlink.copier import Copier
    from omni_kvlink.payload.manifest import Manifest

MIB = 1 << 20
_FILL = 0xA5


def check_copier(copier: Copier) -> None:
    """Run every check against one copier; `CheckFailed` names the first that does not hold."""
    for check in COPIER_CHECKS:
        with naming(check):
            check(copier)


def check_gather_of_every_layout(copier: Copier) -> None:
    """The right bytes at the right offset, no others, and their digests; sources are only read.

    Each dtype in each layout, of odd sizes and of random ones; tensors of one MiB, a row less or
    more, and with rows that do not divide one.
    """
    chance = random.Random(1)
    for name, layout in itertools.product(KV_DTYPES, LAYOUTS):
        _check_gather(copier, name, layout, *(chance.randint(1, 7) for _ in range(3)))
    for seed in range(60):
        name, layout = chance.choice(list(KV_DTYPES)), chance.choice(list(LAYOUTS))
        sizes = [chance.randint(1, 60), chance.randint(1, 9), chance.randint(1, 130)]
        _check_gather(copier, name, layout, *sizes, layers=chance.randint(1, 3), seed=seed)
    for layout in ("contiguous", "heads of more", "every second"):
        for tokens, row in ((1023, 1024), (1024, 1024), (1025, 1024), (2050, 1000), (3, MIB // 2)):
            _check_gather(copier, "uint8", layout, tokens, 2, row // 2, layers=1)


USED = b"\xff"
"""A byte of an earlier payload."""


def check_digests_off(copier: Copier) -> None:
    """A plan without digests is gathered and verified without them."""
    _check_gather(copier, "float32", "contiguous", 5, 2, 3, digests=False)


def check_a_small_payload_is_packed(copier: Copier) -> None:
    """Header, tensors and zeros between: what `gather` and the header's encoder make, and no more.

    Longer and shorter payloads in turn: no byte of an earlier one shows in the gaps.
    """
    for layout, tokens, digests in itertools.product(LAYOUTS, (7, 3, 0, 5), (True, False)):
        sources = _sources("float16", layout, tokens, 3, 5) if tokens else []
        data = TensorTransferData("r \u00e9", {str(n): tensor for n, tensor in enumerate(sources)})
        plan = data.plan(digests=digests)
        checksums = [_digest(reference(tensor)) if digests else "" for tensor in sources]
        right = bytearray(plan.encode(checksums).ljust(plan.nbytes, b"\0"))
        for spec, source in zip(plan.tensors, sources, strict=True):
            start = plan.header_nbytes + spec.start
            right[start : start + spec.nbytes] = reference(source)
        assert copier.pack(data.tensors(), plan) == right, f"{layout}, {tokens} tokens"
    sources = _sources("float16", "contiguous", 5, 2, 4)
    plan = _cache(sources).plan()
    for other in _misfits(sources):
        expect(SchemaError, copier.pack, other, plan)


def check_a_known_layout_is_packed(copier: Copier) -> None:
    """`pack_known` and `pack_into` make what `pack` makes, or nothing; so for another layout's."""
    for layout, digests in itertools.product(LAYOUTS, (True, False)):
        sources = _sources("float16", layout, 5, 3, 4)
        data = TensorTransferData("r 1", {str(n): tensor for n, tensor in enumerate(sources)})
        plan = data.plan(digests=digests)
        packed = copier.pack_known(sources, PayloadLayout(plan), data.request_id)
        right = copier.pack(sources, plan)
        assert packed in (None, right), layout
        region = _used(plan.nbytes)
        is_written = copier.pack_into(sources, plan, region)
        assert region.read() == (right if is_written else USED * plan.nbytes), layout
    sources = _sources("float16", "contiguous", 5, 2, 4)
    known_layout = PayloadLayout(_cache(sources).plan())
    plan = _cache(sources).plan()
    for other in (*_misfits(sources), [sources[0].to("meta"), *sources[1:]]):
        assert copier.pack_known(other, known_layout, "r") is None
        region = _used(plan.nbytes)
        assert not copier.pack_into(other, plan, region)
        assert region.read() == USED * plan.nbytes
    assert not copier.pack_into(sources, plan, _used(plan.nbytes - 1)), "a region too short"


def _used(nbytes: int) -> Region:
    """Memory in which an earlier payload was."""
    region = Region.private(nbytes)
    region.write(0, USED * nbytes)
    return region


def check_scatter_into_every_layout(copier: Copier) -> None:
    """All bytes are copied out, also into strided tensors, whose gaps are not written.

    Small tensors of each dtype, and some of more than one digest chunk.
    """
    cases = [(name, (7, 3, 5)) for name in KV_DTYPES] + [("uint8", (1500, 2, 700))]
    for (name, sizes), layout in itertools.product(
        cases, ("contiguous", "transposed", "every second")
    ):
        sources = _sources(name, "contiguous", *sizes)
        targets = _sources(name, layout, *sizes, seed=99)
        gaps = [_beside(target) for target in targets]
        copier.scatter(*_gathered(copier, sources), targets)
        assert [*map(reference, sources)] == [*map(reference, targets)], f"{name}, {layout}"
        assert [_beside(target) for target in targets] == gaps, f"{name}: wrote outside a target"


def check_changed_bytes_are_named(copier: Copier) -> None:
    """`verify` and `scatter` find one flipped bit anywhere, and name layer, K or V, and the MiB."""
    sources = _sources("uint8", "contiguous", 1500, 2, 700)
    manifest, region = _gathered(copier, sources)
    copier.verify(manifest, region)
    targets = [torch.empty_like(source) for source in sources]
    copier.scatter(manifest, region, targets)
    for spec in manifest.tensors:
        _, layer, part = spec.name.split(".")
        for offset in (0, MIB - 1, MIB, spec.nbytes - 1):
            view = region.view()
            view[manifest.header_nbytes + spec.start + offset] ^= 0x01
            mentions = (f"layer {layer}", part[0].upper(), f"MiB {offset // MIB} of")
            expect(IntegrityError, copier.verify, manifest, region, mentions=mentions)
            expect(IntegrityError, copier.scatter, manifest, region, targets, mentions=mentions)
            view[manifest.header_nbytes + spec.start + offset] ^= 0x01
    copier.verify(manifest, region)


def check_misfits_are_refused(copier: Copier) -> None:
    """Wrong shape, dtype, number of tensors, or a region too short: SchemaError, nothing moved."""
    sources = _sources("float16", "contiguous", 5, 2, 4)
    manifest = _cache(sources).plan()
    region = _region(manifest)
    content = bytes(region.view())
    misfits = [(tensors, region) for tensors in _misfits(sources)]
    for tensors, other in (*misfits, (sources, region.slice(0, manifest.nbytes - 1))):
        expect(SchemaError, copier.gather, tensors, manifest, other)
        expect(SchemaError, copier.scatter, manifest, other, tensors)
    assert bytes(region.view()) == content


def _misfits(sources: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Other numbers, shapes and dtypes of tensors `[5, 2, 4]` of float16."""
    first, *_, last = sources
    others = (first[:4], first.view(2, 5, 4), first.view(torch.bfloat16), first.to(torch.float64))
    return [
        [],
        sources[:-1],
        [*sources, first],
        [*sources[:-1], last.transpose(1, 2)],
        *([other, *sources[1:]] for other in others),
    ]


def check_overlapping_targets_are_refused(copier: Copier) -> None:
    """No byte is written twice: SchemaError names the targets, and nothing is written."""
    sources = _sources("float16", "contiguous", 6, 2, 4)
    manifest, region = _gathered(copier, sources)
    memory = torch.zeros(1000, dtype=torch.float16)
    tokens = (6, 2, 4)
    source_view = tensor_view(region, manifest.tensors[0], manifest.header_nbytes)
    table = BlockTable.of_blocks([2, 0], block_size=4, tokens=6)
    pool = memory.as_strided((3, 4, 2, 4), (32, 8, 4, 1))
    overlapping: list[list[TensorView]] = [
        [memory.as_strided(tokens, (8, 4, 1)), memory.as_strided(tokens, (8, 4, 1), 47)],
        [memory.as_strided(tokens, (24, 4, 1)), memory.as_strided(tokens, (24, 4, 1), 79)],
        [memory.as_strided(tokens, (0, 4, 1)), memory.as_strided(tokens, (8, 4, 1), 500)],
        [PagedTensor(pool, table), PagedTensor(pool, table)],
        [PagedTensor(pool, table), memory.as_strided(tokens, (8, 4, 1), 72)],
        [source_view, memory.as_strided(tokens, (8, 4, 1))],
    ]
    for pair in overlapping:
        free_targets = [torch.zeros(tokens, dtype=torch.float16) for _ in sources[2:]]
        expect(SchemaError, copier.scatter, manifest, region, [*pair, *free_targets])
        assert not memory.any()
        assert not any(other.any() for other in free_targets)
    copier.verify(manifest, region)
    beside: list[TensorView] = [memory.as_strided(tokens, (16, 4, 1), offset) for offset in (0, 8)]
    copier.scatter(manifest, region, [*beside, *map(torch.zeros_like, sources[2:])])
    assert [*map(reference, map(dense, beside))] == [*map(reference, sources[:2])]


def reference(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in row-major order, each row read from where its strides say it lies."""
    size, parts = tensor.element_size(), []
    *outer, inner = tensor.shape
    for index in itertools.product(*map(range, outer)):
        address = tensor.data_ptr() + size * sum(
            i * stride for i, stride in zip(index, tensor.stride(), strict=False)
        )
        if tensor.stride(-1) == 1:
            parts.append(ctypes.string_at(address, inner * size))
        else:
            step = tensor.stride(-1) * size
            parts.extend(ctypes.string_at(address + i * step, size) for i in range(inner))
    return b"".join(parts)


def _check_gather(
    copier: Copier, dtype: str, layout: str, *sizes: int, digests: bool = True, **options: int
) -> None:
    sources = _sources(dtype, layout, *sizes, **options)
    contents, before = [reference(source) for source in sources], hash_tensors(sources)
    data = _cache(sources)
    plan = data.plan(digests=digests)
    region = _region(plan)
    found = copier.gather(data.tensors(), plan, region)
    try:
        _compare(plan, region, contents)
        assert found == [_digest(content) if digests else "" for content in contents], found
        assert hash_tensors(sources) == before, "wrote to its sources"
    except AssertionError as error:
        raise AssertionError(f"{dtype}, {layout} {sizes} {options}: {error}") from None
    copier.verify(plan.with_digests(found) if digests else plan, region)


def _digest(content: bytes) -> str:
    """The digest of a tensor: a CRC-32C of each MiB."""
    parts = (content[start : start + MIB] for start in range(0, len(content), MIB))
    return "".join(f"{numpy_crc32c(part):08x}" for part in parts)


def _compare(plan: Manifest, region: Region, contents: Sequence[bytes]) -> None:
    """Every tensor is at its offset; header, padding and the rest of the region are not written."""
    payload, end = bytes(region.view()), 0
    for spec, content in zip(plan.tensors, contents, strict=True):
        start = plan.header_nbytes + spec.start
        assert set(payload[end:start]) <= {_FILL}, f"wrote before {spec.name}"
        end = start + spec.nbytes
        assert payload[start:end] == content, f"{spec.name} is not its source"
    assert set(payload[end:]) <= {_FILL}, "wrote beyond the payload"


def _gathered(copier: Copier, sources: list[torch.Tensor]) -> tuple[Manifest, Region]:
    data = _cache(sources)
    plan = data.plan()
    region = _region(plan)
    return plan.with_digests(copier.gather(data.tensors(), plan, region)), region


def _region(plan: Manifest) -> Region:
    """A region for the payload and 512 bytes more, filled with a pattern."""
    region = Mapping.anonymous(plan.nbytes + 512).region
    ctypes.memset(region.address, _FILL, region.nbytes)
    return region


def _cache(sources: list[torch.Tensor]) -> KVCacheTransferData:
    tokens, layers = sources[0].shape[0], len(sources) // 2
    blocks = {"key_cache": sources[0::2], "value_cache": sources[1::2]}
    return KVCacheTransferData("r", blocks, (), KVMetadata((tokens,), (tokens,), layers))


def _sources(
    dtype: str, layout: str, tokens: int, heads: int, dim: int, *, layers: int = 2, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return random_tensor(shape, getattr(torch, dtype), generator)

    return [LAYOUTS[layout](make, tokens, heads, dim) for _ in range(2 * layers)]


def _beside(tensor: torch.Tensor) -> bytes:
    """The bytes of the tensor's storage, with zeros for those that are the tensor's."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
    own = whole.view(tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    own.zero_()
    return whole.numpy().tobytes()


Layout = Callable[[Callable[..., torch.Tensor], int, int, int], torch.Tensor]
LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda make, t, h, d: make(t, h, d),
    "transposed": lambda make, t, h, d: make(h, t, d).transpose(0, 1),
    "turned over": lambda make, t, h, d: make(d, h, t).permute(2, 1, 0),
    "heads of more": lambda make, t, h, d: make(t, h + 3, d)[:, 1 : 1 + h],
    "middle": lambda make, t, h, d: make(t + 2, h + 1, d + 3)[1 : 1 + t, 1:, 2 : 2 + d],
    "every second": lambda make, t, h, d: make(2 * t, h, d)[::2],
    "columns": lambda make, t, h, d: make(t, h, 3 * d)[:, :, ::3],
    "one head": lambda make, t, h, d: make(t, 1, d).expand(t, h, d),
    "one token": lambda make, t, h, d: make(1, h, d).expand(t, h, d),
}
"""Views of `t` tokens, `h` heads and `d` elements, of tensors that `make` makes in a shape."""

COPIER_CHECKS: tuple[Callable[[Copier], None], ...] = tuple(
    function
    for name, function in list(globals().items())
    if name.startswith("check_") and name != "check_copier"
)
"""The checks of `check_copier`."""
