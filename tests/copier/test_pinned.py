"""The pinned copier on a fake device; `tests/gpu` tests it on a real one."""

from __future__ import annotations

import gc
import itertools
import re
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVCacheTransferData
from omni_kvlink._native import cuda
from omni_kvlink._native.crc32c import numpy_crc32c
from omni_kvlink.copier import NativeCopier, PinnedCopier, TorchCopier, fastest_copier
from omni_kvlink.copier.pinned import _parts
from omni_kvlink.errors import IntegrityError, NativeError, SchemaError
from omni_kvlink.memory.mapping import MappedPages, Mapping
from omni_kvlink.testing import check_copier
from support.devices.fake_device import ENGINES, KERNEL, MIXED, FakeDevice, address
from support.devices.fake_device import device as device
from support.devices.fake_device import directory as directory
from support.devices.native_plans import NEEDS_LIBRARY, Locked, plan_of, tensor_of
from support.link.ends import delivery_of, use_copier
from support.payloads.paged import LAYOUTS, SIZE, about, copier, expected_bytes, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink import KVConsumer, KVProducer
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

# Reaches into _load, _register: what the copier calls of the CUDA part is counted and put in order
# there.

pytestmark = NEEDS_LIBRARY
MIB = 1 << 20


def payload(sources: Sequence[torch.Tensor]) -> tuple[Manifest, Region]:
    plan = plan_of(sources)
    return plan, Mapping.anonymous(plan.nbytes).region


def true_digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return "".join(f"{numpy_crc32c(data[at : at + MIB]):08x}" for at in range(0, len(data), MIB))


def payload_bytes(plan: Manifest, region: Region, number: int) -> bytes:
    spec = plan.tensors[number]
    start = plan.header_nbytes + spec.start
    return bytes(region.view(start, start + spec.nbytes))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# ---- the bytes


@pytest.mark.parametrize(
    "crossover",
    [ENGINES, KERNEL, *(pytest.param(each, marks=pytest.mark.slow) for each in (MIXED, ""))],
)
def test_the_contract(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, crossover: str) -> None:
    monkeypatch.setenv(cuda.ENVIRONMENT, crossover)
    check_copier(PinnedCopier())


@pytest.mark.parametrize("crossover", [ENGINES, KERNEL])
@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
def test_pages(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, crossover: str, by_slot: bool
) -> None:
    monkeypatch.setenv(cuda.ENVIRONMENT, crossover)
    pinned = PinnedCopier()
    for layout, tokens, dtype in itertools.product(LAYOUTS, (1, SIZE, 10), ("bfloat16", "int8")):
        source, target = (layout(dtype, seed) for seed in (1, 2))
        there, back = (table(tokens, by_slot=by_slot, seed=seed) for seed in (3, 4))
        data, into = (
            KVCacheTransferData.from_paged(
                "r",
                *pools,
                block_size=SIZE,
                metadata=about(tokens),
                **tables,
            )
            for pools, tables in ((source, there), (target, back))
        )
        plan = data.plan()
        region = Mapping.anonymous(plan.nbytes).region
        manifest = plan.with_digests(pinned.gather(data.tensors(), plan, region))
        parts = range(len(plan.tensors))
        assert [payload_bytes(plan, region, number) for number in parts] == expected_bytes(
            source, there, tokens
        )
        copier("torch").verify(manifest, region)
        pinned.scatter(manifest, region, into.tensors())
        assert expected_bytes(target, back, tokens) == expected_bytes(source, there, tokens)


def test_host_and_device_in_one_payload(device: FakeDevice) -> None:
    sources = [tensor_of((40, 2, 8), torch.bfloat16, seed) for seed in range(6)]
    targets = [torch.zeros_like(source) for source in sources]
    here = {id(view) for view in [*sources[::2], *targets[1::2]]}
    device.holds = lambda view: id(view) in here
    plan, region = payload(sources)
    digests = PinnedCopier().gather(sources, plan, region)
    assert digests == [true_digest(source) for source in sources]
    PinnedCopier().scatter(plan.with_digests(digests), region, targets)
    assert [raw(target) for target in targets] == [raw(source) for source in sources]


def test_what_only_torch_can_read(device: FakeDevice) -> None:
    plain = [tensor_of((4, 3), torch.float32, seed) for seed in (1, 2)]
    conjugate = torch.complex(*plain).conj().imag  # negative by a flag, not by its bytes
    assert conjugate.is_neg()
    deep = torch.arange(64.0).view(2, 2, 2, 2, 4).transpose(0, 3)
    plan, region = payload([conjugate, deep])
    digests = PinnedCopier().gather([conjugate, deep], plan, region)
    assert payload_bytes(plan, region, 0) == raw(conjugate.resolve_neg())
    assert payload_bytes(plan, region, 1) == raw(deep)
    assert digests[1] == true_digest(deep)


# ---- time


def test_gather_layer_by_layer(device: FakeDevice) -> None:
    sources = [tensor_of((1500, 2, 350), torch.uint8, seed) for seed in range(4)]
    plan, region = payload(sources)
    pinned, zero = PinnedCopier(), bytes(plan.tensors[0].nbytes)
    parts = [plan.only(plan.tensors[at : at + 2]) for at in (0, 2)]
    first = pinned.begin_gather(sources[:2], parts[0], region)
    second = pinned.begin_gather(sources[2:], parts[1], region)
    assert [payload_bytes(plan, region, number) for number in range(4)] == 4 * [zero]
    assert first.wait() == [true_digest(source) for source in sources[:2]] == first.wait()
    assert [payload_bytes(plan, region, number) for number in (2, 3)] == 2 * [zero]
    assert second.wait() == [true_digest(source) for source in sources[2:]]
    assert [payload_bytes(plan, region, number) for number in range(4)] == list(map(raw, sources))


def test_parts_grow() -> None:
    sizes = [1, 12 * MIB, 25 * MIB, 5 * MIB, 46 * MIB, 99 * MIB, 63 * MIB, MIB, MIB]
    specs = plan_of([torch.empty(size, dtype=torch.uint8) for size in sizes])
    assert [(part.start, part.stop) for part in _parts(specs)] == [
        (0, 2),  # at least 12 MiB
        (2, 3),  # 24
        (3, 5),  # 50, twice the part before
        (5, 6),  # 64, the most
        (6, 8),
        (8, 9),
    ]
    assert list(_parts(plan_of([]))) == []


def test_the_first_copies_begin_before_the_last_are_prepared(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [tensor_of((13, MIB), torch.uint8, seed) for seed in range(3)]
    plan, region = payload(sources)
    begun: list[tuple[str, int]] = []
    begin = cuda.DeviceBatch.begin

    def spy(self: cuda.DeviceBatch, verb: str, *arguments: Any) -> None:
        begun.append((verb, len(self)))
        begin(self, verb, *arguments)

    monkeypatch.setattr(cuda.DeviceBatch, "begin", spy)
    manifest = plan.with_digests(PinnedCopier().gather(sources, plan, region))
    targets = [torch.zeros_like(source) for source in sources]
    PinnedCopier().scatter(manifest, region, targets)
    assert begun == [("gather", 1), ("gather", 2), ("scatter", 1), ("scatter", 2)]
    assert list(map(raw, targets)) == list(map(raw, sources))
    region.view()[-1] ^= 1
    with pytest.raises(IntegrityError):
        PinnedCopier().scatter(manifest, region, targets)


def test_a_dropped_handle_waits_for_its_copies(device: FakeDevice) -> None:
    sources = [tensor_of((5, 2, 8), torch.float32)]
    plan, region = payload(sources)
    handle = PinnedCopier().begin_gather(sources, plan, region)
    assert payload_bytes(plan, region, 0) != raw(sources[0])
    del handle
    gc.collect()
    assert payload_bytes(plan, region, 0) == raw(sources[0])


def test_copied_memory_is_kept_alive(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket keeps both sides of its copies alive."""
    sources = [tensor_of((5, 2, 8), torch.float32)]
    plan, region = payload(sources)
    kept: list[Any] = []

    class Spy(cuda.Ticket):
        def __init__(self, keep: object):
            kept.append(keep)
            super().__init__(keep)

    monkeypatch.setattr(cuda, "Ticket", Spy)
    manifest = plan.with_digests(PinnedCopier().gather(sources, plan, region))
    PinnedCopier().scatter(manifest, region, sources)
    for whole, views in kept:
        assert whole is region
        assert views[0].data_ptr() == sources[0].data_ptr()
    assert len(kept) == 2


def test_a_ticket_keeps_memory_until_it_is_closed(device: FakeDevice) -> None:
    region = Mapping.anonymous(4096).region
    ticket, kept = cuda.Ticket(region), weakref.ref(region.owner)
    del region
    gc.collect()
    assert kept() is not None
    ticket.close()
    assert kept() is None


def test_a_cycle_that_is_collected_frees_memory_behind_its_copies(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tensor_of((5, 2, 8), torch.float32)
    plan, region = payload([source])
    cycle: list[Any] = [region, PinnedCopier().begin_gather([source], plan, region)]
    cycle.append(cycle)
    order = list[str]()
    weakref.finalize(region.owner, order.append, "freed")
    finish = cuda._load().kvlc_finish

    def spy(number: object) -> int:
        order.append("copied")
        return 0 if "freed" in order else int(finish(number))

    monkeypatch.setattr(cuda._load(), "kvlc_finish", spy)
    del cycle, region
    gc.collect()
    assert order == ["copied", "freed"]


def test_other_copiers_gather_at_once() -> None:
    sources = [tensor_of((5, 2, 8), torch.float32)]
    for pinned in (NativeCopier(), TorchCopier()):
        plan, region = payload(sources)
        handle = pinned.begin_gather(sources, plan, region)
        assert payload_bytes(plan, region, 0) == raw(sources[0])
        assert handle.wait() == [true_digest(sources[0])]


# ---- failures


def test_no_copy_is_in_progress_after_a_failure(device: FakeDevice) -> None:
    sources = [tensor_of((13, MIB), torch.uint8, seed) for seed in range(3)]
    plan, region = payload(sources)
    # A copy of the first part, its tables, and its digests.
    with device.set("fails_after", 3), pytest.raises(NativeError, match="fake error"):
        PinnedCopier().begin_gather(sources, plan, region)
    assert payload_bytes(plan, region, 0) == raw(sources[0])  # its copy was waited for
    assert payload_bytes(plan, region, 2) == bytes(13 * MIB)


def test_no_copy_is_in_progress_after_a_failed_wait(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [tensor_of((13, MIB), torch.uint8, seed) for seed in range(3)]
    plan, region = payload(sources)

    def fail(*args: object) -> bytes:
        raise NativeError("no")

    monkeypatch.setattr(cuda.Ticket, "digests", fail)
    handle = PinnedCopier().begin_gather(sources, plan, region)
    with pytest.raises(NativeError, match="no"):
        handle.wait()
    assert payload_bytes(plan, region, 2) == raw(sources[2])
    assert handle  # not collected yet


def test_a_refused_host_tensor_waits_for_the_device(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [tensor_of((5, 2, 8), torch.float32, seed) for seed in (1, 2)]
    device.holds = lambda view: address(view) == sources[0].data_ptr()
    plan, region = payload(sources)

    def refuse(*args: object, deadline: float) -> list[str]:
        raise SchemaError("no")

    monkeypatch.setattr(NativeCopier, "gather", refuse)
    with pytest.raises(SchemaError, match="no") as caught:
        PinnedCopier().begin_gather(sources, plan, region)
    assert payload_bytes(plan, region, 0) == raw(sources[0])
    assert caught.tb  # the traceback keeps the memory: no garbage collection has waited


def test_a_wrong_digest_is_raised_after_all_copies(device: FakeDevice) -> None:
    sources = [tensor_of((5, 2, 8), torch.float32)]
    plan, region = payload(sources)
    manifest = plan.with_digests(PinnedCopier().gather(sources, plan, region))
    region.view()[plan.header_nbytes] ^= 1
    target = torch.zeros_like(sources[0])
    with pytest.raises(IntegrityError, match=r"layer 0, K: .*MiB 0 of 1") as caught:
        PinnedCopier().scatter(manifest, region, [target])
    assert raw(target) == payload_bytes(plan, region, 0)  # as it was at the call's end
    assert caught.tb  # as above


def test_targets_that_overlap_themselves(device: FakeDevice) -> None:
    sources = [tensor_of((5, 2, 8), torch.float32)]
    plan, region = payload(sources)
    manifest = plan.with_digests(PinnedCopier().gather(sources, plan, region))
    target = torch.zeros(5, 1, 8).expand(5, 2, 8)
    with pytest.raises(SchemaError, match=r"layer 0, K: .*overlaps itself"):
        PinnedCopier().scatter(manifest, region, [target])


# ---- registered memory


def test_a_mapping_is_registered_once_and_unregistered_in_time(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [tensor_of((5, 2, 8), torch.float32)]
    plan = plan_of(sources)
    mapping = Mapping.anonymous(4 * plan.nbytes)
    regions = [mapping.region.slice(at * plan.nbytes, plan.nbytes) for at in range(4)]
    calls: list[int] = []
    register = cuda._register

    def counted(pages: MappedPages, device: int) -> str | None:
        calls.append(pages.nbytes)
        return register(pages, device)

    monkeypatch.setattr(cuda, "_register", counted)
    for region in regions:
        PinnedCopier().gather(sources, plan, region)
    assert len(calls) == 1
    before = device.get("unregistered")
    view = regions[3].view()
    del mapping, regions, region
    gc.collect()
    assert device.get("unregistered") == before  # a view is left
    assert bytes(view[plan.header_nbytes :]) == raw(sources[0])
    del view
    gc.collect()
    assert device.get("unregistered") == before + 1
    assert device.get("unregistered_late") == 0


def test_memory_that_cannot_be_page_locked(device: FakeDevice) -> None:
    sources = [tensor_of((5, 2, 8), torch.float32, seed) for seed in (1, 2)]
    pinned = PinnedCopier()
    with device.set("refuses_registration", 1):
        for turn in range(2):
            plan, region = payload(sources)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                digests = pinned.gather(sources, plan, region)
            assert digests == [true_digest(source) for source in sources]
            assert len(caught) == 1 - turn
            assert all(re.match(WARNING, str(warning.message)) for warning in caught)
    plan = plan_of(sources)
    with pytest.warns(RuntimeWarning, match="no mapping of this library's"):
        PinnedCopier().gather(sources, plan, Locked(plan.nbytes).region)


WARNING = (
    r"the payload cannot be page-locked: cudaHostRegister of \d+ bytes: a fake error; "
    r"raise the limit of locked memory .*Device tensors are copied by torch"
)


# ---- choosing it


def test_fastest_copier(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = fastest_copier()
    assert chosen.name == "pinned"
    assert re.fullmatch(r"[a-z0-9+]+, cuda 13\.0, Fake", chosen.features)
    with device.set("devices", 0):
        assert fastest_copier().name != "pinned"
        with pytest.raises(NativeError, match=r"no CUDA device: .*install NVIDIA's driver"):
            PinnedCopier()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fastest_copier().name != "pinned"


def test_through_a_link(device: FakeDevice, ends: tuple[KVProducer, KVConsumer]) -> None:
    """Copies from a consumer's readonly mapping, too."""
    producer, consumer = ends
    pinned = use_copier(PinnedCopier(), producer, consumer)
    keys, values = ([tensor_of((9, 2, 4), torch.bfloat16, 9 * part)] for part in (1, 2))
    blocks = {"key_cache": keys, "value_cache": values}
    cache = KVCacheTransferData("r", blocks, (), {"kv_lens": [9], "ropes": [9], "num_layers": 1})
    before = device.get("readonly")
    receipt = producer.put(cache)
    received = consumer.get("r", timeout=60, verify="full")
    targets = [torch.zeros_like(keys[0]) for _ in range(2)]
    with received as data:
        region = delivery_of(received).region
        assert region is not None
        pinned.scatter(received.manifest, region, targets)
        assert [raw(target) for target in targets] == [raw(keys[0]), raw(values[0])]
        assert device.get("readonly") - before == 1
        del region
    del data, received
    gc.collect()
    receipt.wait(timeout=60)
