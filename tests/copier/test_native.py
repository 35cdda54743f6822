"""The native copier gives the reference's bytes and digests, on any layout, from any thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_kvlink import KVCacheTransferData, TensorTransferData
from omni_kvlink._native import host
from omni_kvlink.copier import Copier, NativeCopier, TorchCopier, fastest_copier, native
from omni_kvlink.errors import IntegrityError, NativeError, SchemaError
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.memory.region import Region
from omni_kvlink.payload import tensor_memory
from omni_kvlink.payload.format import DIGEST_CHUNK
from omni_kvlink.payload.manifest import Layout, Manifest
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.testing import COPIER_CHECKS
from support.devices.native_plans import (
    DTYPES,
    FEATURES,
    NEEDS_LIBRARY,
    as_bytes,
    plan_of,
    tensor_of,
    using,
)
from support.payloads.strategies import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable

# Reaches into _BY_CODE, _Batch: torch's types by their codes; and the slow way, so that its use is
# an error.

pytestmark = NEEDS_LIBRARY


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("check", COPIER_CHECKS, ids=lambda check: check.__name__[6:])
def test_kit(check: Callable[[Copier], None], features: str) -> None:
    with using(features):
        check(NativeCopier())


@st.composite
def layouts(draw: st.DrawFn) -> torch.Tensor:
    """A [tokens, heads, dim] tensor: sliced, transposed, expanded or none of these."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = [draw(st.integers(1, 70)), draw(st.integers(1, 5)), draw(st.integers(1, 150))]
    order = draw(st.permutations(range(3)))
    steps = [draw(st.integers(1, 2)) if draw(st.booleans()) else 1 for _ in shape]
    starts = [draw(st.integers(0, 3)) if draw(st.booleans()) else 0 for _ in shape]
    whole = [start + size * step for start, size, step in zip(starts, shape, steps, strict=True)]
    base = tensor_of([whole[axis] for axis in order], dtype, seed=draw(st.integers(0, 99)))
    back = [order.index(axis) for axis in range(3)]
    cut = [slice(start, None, step) for start, step in zip(starts, steps, strict=True)]
    tensor = base.permute(*back)[tuple(cut)]
    tensor = tensor[: shape[0], : shape[1], : shape[2]]
    if draw(st.integers(0, 5)) == 0:
        tensor = tensor[:1].expand(shape[0], -1, -1)
    return tensor


@pytest.mark.parametrize("features", FEATURES)
@settings(max_examples=EXAMPLES * 60, deadline=None)
@given(tensors=st.lists(layouts(), min_size=1, max_size=4), digests=st.booleans())
def test_same_as_torch(features: str, tensors: list[torch.Tensor], digests: bool) -> None:
    plan = plan_of(tensors, digests=digests)
    ours, theirs = Mapping.anonymous(plan.nbytes).region, Mapping.anonymous(plan.nbytes).region
    with using(features):
        native, reference = NativeCopier(), TorchCopier()
        found = native.gather(tensors, plan, ours)
        assert found == reference.gather(tensors, plan, theirs)
        assert bytes(ours.view()) == bytes(theirs.view())
        committed = plan.with_digests(found)
        native.verify(committed, ours)
        targets = [torch.empty_like(tensor.contiguous()) for tensor in tensors]
        native.scatter(committed, ours, targets)
        for tensor, target in zip(tensors, targets, strict=True):
            assert as_bytes(tensor) == as_bytes(target)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("more", [-257, -65, -1, 0, 1, 63, 64, 255, 256, 257, DIGEST_CHUNK + 1])
def test_chunk_boundaries(features: str, more: int) -> None:
    source = tensor_of([DIGEST_CHUNK + more, 1, 1], torch.uint8)
    plan = plan_of([source])
    ours, theirs = Mapping.anonymous(plan.nbytes).region, Mapping.anonymous(plan.nbytes).region
    with using(features):
        digests = NativeCopier().gather([source], plan, ours)
        assert digests == TorchCopier().gather([source], plan, theirs)
        assert bytes(ours.view()) == bytes(theirs.view())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_streamed_and_threaded(threads: int) -> None:
    sources = [tensor_of([3000, 4, 256], torch.bfloat16, seed) for seed in range(4)]
    sources[1] = tensor_of([3000, 8, 256], torch.bfloat16)[:, 2:6]
    plan = plan_of(sources)
    region = Mapping.anonymous(plan.nbytes).region
    copier = NativeCopier(threads=threads)
    committed = plan.with_digests(copier.gather(sources, plan, region))
    assert committed.tensors[0].digest
    targets = [torch.empty(3000, 4, 256, dtype=torch.bfloat16) for _ in sources]
    targets[2] = torch.empty(4, 3000, 256, dtype=torch.bfloat16).transpose(0, 1)
    copier.scatter(committed, region, targets)
    for source, target in zip(sources, targets, strict=True):
        assert as_bytes(source) == as_bytes(target)


@pytest.mark.parametrize("threads", [1, 3])
def test_damage_is_named_by_layer_and_mib(threads: int) -> None:
    sources = [tensor_of([5000, 4, 128], torch.bfloat16, seed) for seed in range(3)]
    plan = plan_of(sources)
    region = Mapping.anonymous(plan.nbytes).region
    copier = NativeCopier(threads=threads)
    committed = plan.with_digests(copier.gather(sources, plan, region))
    for layer, mib in ((2, 3), (1, 4)):
        at = plan.header_nbytes + plan.tensors[layer].start + mib * DIGEST_CHUNK + 17
        region.view()[at] ^= 1
        with pytest.raises(IntegrityError, match=rf"layer {layer}, K: .*MiB {mib} of 5"):
            copier.verify(committed, region)
        with pytest.raises(IntegrityError, match=rf"layer {layer}, K: .*MiB {mib} of 5"):
            copier.scatter(committed, region, sources)


def test_overlapping_target_is_refused() -> None:
    source = tensor_of([40, 2, 16], torch.float16)
    plan = plan_of([source])
    region = Mapping.anonymous(plan.nbytes).region
    committed = plan.with_digests(NativeCopier().gather([source], plan, region))
    for target in (
        torch.zeros(1, 2, 16, dtype=torch.float16).expand(40, 2, 16),
        torch.zeros(2000, dtype=torch.float16).as_strided([40, 2, 16], [31, 16, 1]),
    ):
        with pytest.raises(SchemaError, match=r"layer 0, K: .*overlaps itself"):
            NativeCopier().scatter(committed, region, [target])
        assert not target.any()


def test_what_only_torch_can_read() -> None:
    """Lazily negated tensors, and more dimensions with gaps than the library supports."""
    lazy = torch.randn(30, 2, 8, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    gaps = tensor_of([4, 4, 4, 4, 4, 2], torch.float32)[::2, ::3, ::2, ::3, ::2, :1]
    sources = [lazy, tensor_of([9, 2, 8], torch.int8), gaps]
    plan = plan_of(sources)
    ours, theirs = Mapping.anonymous(plan.nbytes).region, Mapping.anonymous(plan.nbytes).region
    digests = NativeCopier().gather(sources, plan, ours)
    assert digests == TorchCopier().gather(sources, plan, theirs)
    assert bytes(ours.view()) == bytes(theirs.view())
    targets = [torch.zeros(30, 2, 8), torch.zeros(9, 2, 8, dtype=torch.int8)]
    targets.append(torch.zeros(4, 4, 4, 4, 4, 2)[::2, ::3, ::2, ::3, ::2, :1])
    NativeCopier().scatter(plan.with_digests(digests), ours, targets)
    for source, target in zip(sources, targets, strict=True):
        assert as_bytes(source.resolve_neg()) == as_bytes(target)


@pytest.mark.parametrize("kind", [NativeCopier, TorchCopier])
def test_tensors_without_dimensions_or_elements(kind: type[Copier]) -> None:
    copier = kind()
    lazy = torch.tensor(1 + 2j, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    sources = [lazy, torch.zeros(0, 3), torch.tensor(7, dtype=torch.int8), torch.zeros(2, 0)]
    plan = plan_of(sources)
    region = Mapping.anonymous(plan.nbytes).region
    committed = plan.with_digests(copier.gather(sources, plan, region))
    targets = [torch.zeros_like(source.resolve_neg()) for source in sources]
    copier.scatter(committed, region, targets)
    copier.verify(committed, region)
    assert [target.tolist() for target in targets] == [-2.0, [], 7, [[], []]]


def test_callers_from_many_threads() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(10):
                source = tensor_of([200 + seed, 3, 70], torch.float16, seed + turn)
                plan = plan_of([source])
                region = Mapping.anonymous(plan.nbytes).region
                copier = NativeCopier(threads=1 + turn % 2)
                digests = copier.gather([source], plan, region)
                copier.verify(plan.with_digests(digests), region)
                region.view()[plan.header_nbytes + 5] ^= 1
                with pytest.raises(IntegrityError, match="MiB 0"):
                    copier.verify(plan.with_digests(digests), region)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_small_payload_takes_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [tensor_of([5, 3, 7], torch.float16, 1), torch.empty(0, 2, 2, dtype=torch.float16)]
    monkeypatch.setattr(native, "_Batch", None)
    for digests in (True, False):
        data = TensorTransferData("r", dict(zip("ab", sources, strict=True)))
        payload = NativeCopier().pack(sources, data.plan(digests=digests))
        manifest = Manifest.decode(payload)
        assert [bool(spec.digest) for spec in manifest.tensors] == [digests, False]
        received = TensorTransferData.from_region(manifest, Region.copy_of(memoryview(payload)))
        assert torch.equal(received["a"].view(torch.int16), sources[0].view(torch.int16))


def test_a_known_layout_needs_no_manifest() -> None:
    """Where all tensors are dense; the others are copied in another way."""
    dense = torch.randn(30, 2, 8)
    data = TensorTransferData("r", {"a": dense, "b": torch.zeros(0)})
    known, right = Layout(data.plan()), NativeCopier().pack(data.tensors(), data.plan())
    assert NativeCopier().pack_known(data.tensors(), known, "r") == right
    longer = NativeCopier().pack_known(data.tensors(), known, "an \u00e9 more")
    assert longer is not None
    assert Manifest.decode(longer).request_id == "an \u00e9 more"
    lazy = torch._neg_view(dense)
    assert (lazy.is_neg(), lazy.is_contiguous()) == (True, True)
    table = BlockTable.of_blocks([0, 1], tokens=30, block_size=16)
    paged = PagedTensor(torch.zeros(2, 16, 2, 8), table)
    for other in (torch.randn(30, 8, 2).transpose(1, 2), lazy, paged):
        assert other.shape == dense.shape
        assert NativeCopier().pack_known([other, torch.zeros(0)], known, "r") is None


ALONE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
"""Whether torch describes its tensors to C code."""


@pytest.mark.skipif(not ALONE, reason="this torch has no DLPack exchange API")
def test_torch_is_asked_nothing_about_tensors_that_lie_as_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = {code: torch.ones(3, 2).to(dtype) for code, dtype in tensor_memory._BY_CODE.items()} | {
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 5),
        "one": torch.zeros(1, 3)[:, 1:2],
    }
    data = TensorTransferData("r", named | {"wide": torch.ones(2, requires_grad=True)})
    known, right = Layout(data.plan()), NativeCopier().pack(data.tensors(), data.plan())
    assert known.packed is not None
    monkeypatch.setattr(native, "dense_addresses", None)
    assert NativeCopier().pack_known(data.tensors(), known, "r") == right


class Renamed(torch.Tensor):
    """A tensor that may answer otherwise than its memory says."""


def test_other_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = torch.randn(6, 4)
    data = TensorTransferData("r", {"a": dense, "b": torch.zeros(3)})
    known, left = Layout(data.plan()), list[object]()
    monkeypatch.setattr(native, "dense_addresses", lambda sources, specs: left.append(sources))
    for other in (
        *(torch.randn(4, 6), torch.randn(6, 4, 1), torch.randn(6, 4).half(), torch.randn(4, 6).T),
        *(torch.randn(6, 8)[:, :4], torch._neg_view(dense), torch.empty(6, 4, device="meta")),
        *(dense.to_sparse(), dense.as_subclass(Renamed), torch.nn.Parameter(dense)),
    ):
        sources = [other, torch.zeros(3)]
        assert NativeCopier().pack_known(sources, known, "r") is None
        assert left.pop() is sources
    assert NativeCopier().pack_known([dense], known, "r") is None
    assert NativeCopier().pack_known([dense, torch.zeros(3)], known, "an id") is None
    assert len(left) == 2
    copier = NativeCopier()
    copier._describe = 0  # a torch of before
    assert copier.pack_known([dense, torch.zeros(3)], known, "r") is None
    assert len(left) == 3


def test_a_tensor_without_memory_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside `vmap` its type is torch.Tensor, and torch cannot describe it."""
    data = TensorTransferData("r", {"a": torch.zeros(3)})
    known, found = Layout(data.plan()), list[bytes | None]()
    monkeypatch.setattr(native, "dense_addresses", lambda sources, specs: None)

    def put(row: torch.Tensor) -> torch.Tensor:
        assert type(row) is torch.Tensor
        found.append(NativeCopier().pack_known([row], known, "r"))
        return row

    torch.func.vmap(put)(torch.randn(2, 3))
    assert found == [None]


def test_a_few_dense_tensors_need_no_structs(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [tensor_of([5, 3, 7], torch.float16, 1), torch.empty(0, 2, 2, dtype=torch.float16)]
    for digests in (True, False):
        data = TensorTransferData("r", dict(zip("ab", sources, strict=True)))
        plan = data.plan(digests=digests)
        region = Mapping.anonymous(plan.nbytes).region
        with monkeypatch.context() as patch:
            patch.setattr(native, "_Batch", None)
            found = NativeCopier().gather(sources, plan, region)
        assert found == (NativeCopier().digest(plan, region) if digests else ["", ""])
        received = TensorTransferData.from_region(plan, region)
        assert torch.equal(received["a"].view(torch.int16), sources[0].view(torch.int16))


def test_what_one_call_refuses_is_named() -> None:
    plan = TensorTransferData("r", {"a": torch.zeros(8)}).plan()
    region = Mapping.anonymous(plan.nbytes + 256).region
    near = torch.frombuffer(region.span, dtype=torch.float32)[plan.header_nbytes // 4 + 1 :][:8]
    with pytest.raises(SchemaError, match=r"tensor 'a': .*same memory"):
        NativeCopier().gather([near], plan, region)


def test_choice() -> None:
    assert NativeCopier().features in FEATURES
    for features in ("auto", "portable"):
        with using(features):
            assert fastest_copier().name == "native"
    with pytest.raises(NativeError, match=r"'mmx'.*OMNI_KVLINK_FEATURES"):
        host.select("mmx")


@pytest.mark.parametrize(("tokens", "stores"), [(600, host.AUTO), (5000, host.STREAM)])
def test_a_part_of_a_large_payload_goes_past_the_cache(
    monkeypatch: pytest.MonkeyPatch, tokens: int, stores: int
) -> None:
    """A layer alone would fit into the cache and evict those before it."""
    seen, init = list[int](), host.CopyBatch.__init__

    def watched(batch: host.CopyBatch, *args: int, **options: int) -> None:
        seen.append(options["stores"])
        init(batch, *args, **options)

    monkeypatch.setattr(host.CopyBatch, "__init__", watched)
    layers = [torch.zeros(tokens, 4, 64) for _ in range(2)]
    metadata = {"kv_lens": [tokens], "ropes": [0], "num_layers": 2}
    blocks = {"key_cache": layers, "value_cache": layers}
    plan = KVCacheTransferData("r", blocks, metadata=metadata).plan()
    part = plan.part(range(2))
    NativeCopier().gather(layers, part, Mapping.anonymous(plan.nbytes).region)
    assert set(seen) == {stores}
