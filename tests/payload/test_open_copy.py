"""Small payloads that are opened in one call: the same as header by header, or not at all."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from omni_kvlink._native import host
from omni_kvlink.connectors.protocol.delivery import Delivery
from omni_kvlink.copier import TorchCopier
from omni_kvlink.errors import WireError
from omni_kvlink.link import Received
from omni_kvlink.memory.region import Region
from omni_kvlink.payload import tensor_memory
from omni_kvlink.payload.layout_cache import LayoutCache
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.tensor_memory import open_copy
from support.payloads.small_payloads import MAKERS, bytes_of, metadata_alone, tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.payload.bundle import Payload

needs_native = pytest.mark.skipif(
    # That it is there, or not, is what the test depends on.
    host.missing() is not None or not tensor_memory._MAKE,
    reason="no native library, or no DLPack exchange API",
)


class Lease:
    def __init__(self) -> None:
        self.outcomes = list[str]()

    def path_name(self, *, is_copy: bool) -> str:
        return "copy" if is_copy else "view"

    def release(self, outcome: str, reason: str) -> None:
        self.outcomes.append(outcome)

    def reject(self, reason: str) -> None:
        raise AssertionError(reason)

    def coalesce(self, act: Callable[[], object]) -> object:
        return act()


def seen(*payloads: Payload) -> LayoutCache:
    layouts = LayoutCache()
    for data in payloads:
        layouts.read_header(bytes_of(data))
    return layouts


def received(
    payload: memoryview, layouts: LayoutCache, key: str = "key"
) -> tuple[Received, weakref.ref[object], Lease]:
    region, lease = Region.copy_of(payload), Lease()
    delivery = Delivery(key, region, lease, copies=1, head=payload)  # type: ignore[arg-type]
    opened = Received(delivery, TorchCopier(), layouts, started=0.0, verify="full")
    return opened, weakref.ref(region.span), lease


@needs_native
@pytest.mark.parametrize("name", ["tensors", "cache"])
def test_it_is_what_the_reference_opens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    payload, layouts = (
        bytes_of(MAKERS[name]("key", seed=3)),
        seen(*(make("key") for make in MAKERS.values())),
    )
    one_call = received(payload, layouts)
    assert open_copy(Region.copy_of(payload), payload, "key", layouts) is not None
    # As where torch has no such API: the reference opens it.
    monkeypatch.setattr(tensor_memory, "_MAKE", 0)
    assert open_copy(Region.copy_of(payload), payload, "key", layouts) is None
    reference = received(payload, layouts)
    for opened, _, _ in (one_call, reference):
        assert opened.data.difference(MAKERS[name]("key", seed=3)) == ""  # type: ignore[arg-type]
        assert opened.manifest == Manifest.decode(payload)
        assert opened.ledger.digests == "crc32c"
    span, lease = one_call[1:]
    one_call[0].release()
    del one_call, opened, _
    gc.collect()
    assert (span(), lease.outcomes) == (None, ["read"])


@needs_native
def test_each_wrong_byte_of_a_header_is_found() -> None:
    put = tensors()
    payload, layouts = bytes_of(put), seen(put)
    for at in range(Manifest.decode(payload).header_nbytes):
        flipped = bytearray(payload)
        flipped[at] ^= 1
        view = memoryview(flipped)
        assert open_copy(Region.copy_of(view), view, "key", layouts) is None
        with pytest.raises(WireError):
            received(view, layouts)
    assert open_copy(Region.copy_of(payload), payload, "key", layouts) is not None


@needs_native
@pytest.mark.parametrize("key", ["other", "ke", "key1", "ä", 'k"y'])
def test_the_payload_of_another_request(key: str) -> None:
    payload, layouts = bytes_of(tensors()), seen(tensors())
    assert open_copy(Region.copy_of(payload), payload, key, layouts) is None
    with pytest.raises(WireError, match="requested"):
        received(payload, layouts, key)


@needs_native
@pytest.mark.parametrize("cut", [1, 4, 5000])
def test_a_payload_that_was_cut(cut: int) -> None:
    payload, layouts = bytes_of(tensors()), seen(tensors())
    view = payload[: max(8, len(payload) - cut)]
    assert open_copy(Region.copy_of(view), view, "key", layouts) is None
    with pytest.raises(WireError):
        received(view, layouts)


ALL = MAKERS | {"metadata alone": metadata_alone}


@pytest.mark.parametrize("name", ALL)
def test_every_kind_and_the_unknown(name: str) -> None:
    """A bundle and nested tensors take the way of the reference; so does the first of a layout."""
    payload = bytes_of(ALL[name]("key", seed=5))
    for layouts in (LayoutCache(), seen(*(make("key") for make in ALL.values()))):
        opened, _, _ = received(payload, layouts)
        assert opened.data.difference(ALL[name]("key", seed=5)) == ""  # type: ignore[arg-type]


@needs_native
def test_a_header_that_ends_off_the_alignment() -> None:
    put, layouts = tensors(), seen(tensors())
    plan, payload = Manifest.decode(bytes_of(put)), bytes_of(put)
    assert plan.layout is not None
    header = plan.layout.render("key", plan.digests, plan.header_nbytes + 1)
    moved = memoryview(header + payload[plan.header_nbytes :])
    assert open_copy(Region.copy_of(moved), moved, "key", layouts) is None
    with pytest.raises(WireError, match="not on a multiple"):
        received(moved, layouts)
