"""Payloads that are opened before they come: what they hold is what came, or they are not used."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import TensorTransferData
from omni_kvlink._native import host
from omni_kvlink.payload.expected import ExpectedPayload
from omni_kvlink.payload.manifest import Layout, Manifest
from support.payloads.random_caches import noise
from support.payloads.small_payloads import MAKERS, bytes_of, nested, tensors

if TYPE_CHECKING:
    from omni_kvlink.payload.bundle import Payload


def expected_like(data: Payload, key: str = "key") -> ExpectedPayload:
    expected = ExpectedPayload(Layout(Manifest.decode(bytes_of(data))), key)
    expected.open()
    return expected


@pytest.fixture(params=["native", "no library"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no library":
        monkeypatch.setattr(host, "is_loaded", lambda: False)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_what_comes_is_in_the_views(name: str, verify: bool) -> None:
    """And the manifest is that of a payload that is decoded."""
    make = MAKERS[name]
    expected = expected_like(make("other"))
    put = make("key", seed=7)
    payload = bytes_of(put)
    region = expected.fill(payload, verify=verify)
    assert region is not None
    assert region.readonly
    assert expected.is_covered
    assert bytes(region.view()) == payload
    assert expected.data.difference(put) == ""  # type: ignore[arg-type]
    assert expected.header is not None
    assert expected.header.manifest() == Manifest.decode(payload)
    plan = Manifest.decode(payload)
    assert (expected.plan.nbytes, expected.plan.has_digests) == (plan.nbytes, plan.has_digests)


OTHERS = {
    "another request": bytes_of(tensors("kez")),
    "a longer request id": bytes_of(tensors("a longer request id")),
    "another name": bytes_of(
        TensorTransferData("key", {"a": noise(0, (3, 8)), "c": noise(1, (5,), "bfloat16")})
    ),
    "another shape": bytes_of(tensors(a=noise(0, (8, 3)))),
    "another dtype": bytes_of(tensors(a=noise(0, (3, 8), "int32"))),
    "more bytes": bytes_of(tensors(b=noise(0, (500,)))),
    "no digests": bytes_of(tensors(), digests=False),
    "metadata": bytes_of(TensorTransferData("key", tensors().tree, {"step": 1})),
    "cut": bytes_of(tensors())[:-1],
    "empty": memoryview(b""),
}
"""Payloads beside `tensors("key")`."""


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_expected(name: str) -> None:
    expected = expected_like(tensors())
    assert expected.fill(OTHERS[name], verify=False) is None
    assert expected.header is None


@pytest.mark.usefixtures("library")
def test_a_flipped_bit_of_the_header() -> None:
    """Whichever: nothing is taken for what was expected."""
    payload = bytes_of(tensors())
    for bit in range(8 * (8 + int.from_bytes(payload[:8], "little"))):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        assert expected_like(tensors()).fill(memoryview(flipped), verify=False) is None, bit


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", MAKERS)
def test_a_flipped_bit_of_a_tensor(name: str) -> None:
    """It is found by its digest, where that is asked; padding has none."""
    put = MAKERS[name]("key")
    payload = bytes_of(put)
    manifest = Manifest.decode(payload)
    data = manifest.header_nbytes
    spans = [range(data + spec.start, data + spec.stop) for spec in manifest.tensors]
    for at in range(data, len(payload)):
        flipped = bytearray(payload)
        flipped[at] ^= 4
        expected = expected_like(put)
        is_padding = not any(at in span for span in spans)
        assert (expected.fill(memoryview(flipped), verify=True) is not None) is is_padding
        assert (expected.header is not None) is is_padding
    assert expected_like(put).fill(memoryview(flipped), verify=False) is not None


@pytest.mark.usefixtures("library")
def test_a_payload_without_digests_is_not_covered() -> None:
    payload = bytes_of(tensors(), digests=False)
    expected = ExpectedPayload(Layout(Manifest.decode(payload)), "key")
    expected.open()
    assert expected.fill(payload, verify=True) is not None
    assert not expected.is_covered


def test_a_request_id_that_json_escapes() -> None:
    """The decoder of all headers reads those."""
    put = tensors('ä"')
    assert expected_like(tensors(), 'ä"').fill(bytes_of(put), verify=False) is None


def test_one_that_was_not_opened() -> None:
    expected = ExpectedPayload(Layout(Manifest.decode(bytes_of(tensors()))), "key")
    assert expected.fill(bytes_of(tensors()), verify=False) is None


def test_it_is_filled_once() -> None:
    """The views of the first are its reader's."""
    expected = expected_like(tensors())
    assert expected.fill(bytes_of(tensors()), verify=False) is not None
    assert expected.fill(bytes_of(tensors(seed=3)), verify=False) is None
    assert expected.data.difference(tensors()) == ""  # type: ignore[arg-type]


def test_metadata_is_its_readers_own() -> None:
    layout = Layout(Manifest.decode(bytes_of(nested())))
    for _ in range(2):
        expected = ExpectedPayload(layout, "key")
        expected.open()
        assert expected.fill(bytes_of(nested()), verify=False) is not None
        assert expected.header is not None
        data, manifest = expected.data, expected.header.manifest()
        assert isinstance(data, TensorTransferData)
        assert data.metadata == {"steps": [{"at": 1}]}
        assert manifest.branches[0].extra == {"steps": [{"at": 1}]}
        data.metadata["steps"][0]["at"] = 2
        data.tree["more"] = torch.zeros(1)


def test_the_manifest_keeps_no_memory() -> None:
    expected = expected_like(tensors())
    region = expected.fill(bytes_of(tensors()), verify=False)
    assert region is not None
    span, header = weakref.ref(region.span), expected.header
    del region, expected
    assert span() is None
    assert header is not None
    assert header.manifest().request_id == "key"
