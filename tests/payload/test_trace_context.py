"""The trace context of a put in its payload's header: any reader reads it, no cache keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import KVCacheBundle, KVCacheTransferData, SameAs, TensorTransferData, WireError
from omni_kvlink._native import host
from omni_kvlink.payload.layout_cache import KnownHeader, LayoutCache
from omni_kvlink.payload.manifest import Manifest
from support.payloads.random_caches import cache

if TYPE_CHECKING:
    from omni_kvlink.payload.bundle import Payload


@pytest.fixture(autouse=True, params=["native", "python"])
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(host, "is_loaded", lambda: False)
    elif reason := host.missing():
        pytest.skip(reason)


def context(number: int) -> dict[str, str]:
    return {"traceparent": f"00-{number:032x}-{number:016x}-01"}


def plan(request_id: str = "req-1") -> Manifest:
    return TensorTransferData(request_id, {"x": torch.zeros(3)}).plan()


def payloads() -> list[Payload]:
    one = cache()
    assert isinstance(one, KVCacheTransferData)
    bundle = KVCacheBundle(one.request_id, {"gen": one, "cfg": SameAs("gen")})
    nested = TensorTransferData("tensors", {"a": [torch.zeros(2), {"b": torch.zeros(())}]})
    return [one, bundle, nested]


@pytest.mark.parametrize("number", range(3))
def test_a_traced_header_is_read_as_any_other(number: int) -> None:
    data = payloads()[number]
    untraced = data.plan()
    traced = untraced.with_trace({**context(7), "tracestate": "vendor=1"})
    read = Manifest.decode(traced.encode(), traced.nbytes)
    assert read == traced
    assert read.producer == {**untraced.producer, **context(7), "tracestate": "vendor=1"}
    assert (read.branches, read.tensors) == (untraced.branches, untraced.tensors)


def test_a_reader_knows_the_layout_of_traced_headers() -> None:
    """Each differs in its trace context; they are compared, not decoded, from the second on."""
    layouts, read = LayoutCache(), list[bool]()
    for number in range(1, 5):
        traced = plan(f"req-{number}").with_trace(context(number))
        header = layouts.read_header(traced.encode(), traced.nbytes)
        read.append(isinstance(header, KnownHeader))
        manifest = header.manifest() if isinstance(header, KnownHeader) else header
        assert manifest == traced
    assert read == [False, True, True, True]
    assert layouts.repeated(1 << 20) is None  # the next one has other bytes
    untraced = plan()
    assert isinstance(layouts.read_header(untraced.encode(), untraced.nbytes), KnownHeader)


def test_a_plan_that_is_kept_has_no_trace_context() -> None:
    layouts, data = LayoutCache(), payloads()[0]
    first = data.cached_plan(layouts, digests=True)
    assert first.with_trace(context(1)).encode() != first.encode()
    assert data.cached_plan(layouts, digests=True).encode() == first.encode()
    again = first.with_trace(context(1)).with_trace(context(2))
    assert again.producer == {**first.producer, **context(2)}


def test_no_byte_of_a_trace_context_can_change_unseen() -> None:
    traced = plan().with_trace(context(7))
    text, layouts = traced.encode(), LayoutCache()
    layouts.read_header(text, traced.nbytes)
    at = text.index(b"traceparent")
    for position in range(at, at + 75):
        changed = bytearray(text)
        changed[position] ^= 1
        with pytest.raises(WireError):
            layouts.read_header(bytes(changed), traced.nbytes)


def test_allocated_memory_keeps_the_length_of_its_header() -> None:
    roomy = plan().as_capacity()
    data = TensorTransferData("req-1", {"x": torch.zeros(3)})
    fitting = data.plan(capacity=roomy)
    traced = fitting.with_trace(context(7), grows=False)
    assert traced.header_nbytes == fitting.header_nbytes
    assert "traceparent" in Manifest.decode(traced.encode(), traced.nbytes).producer
    tight = plan()
    state = {**context(7), "tracestate": "v=" + "x" * 500}
    assert tight.with_trace(state, grows=False) is tight
    assert tight.with_trace(state).header_nbytes > tight.header_nbytes
