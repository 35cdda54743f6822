"""Limits of a layout that no other check repeats."""

from __future__ import annotations

import struct

import pytest

from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.payload.manifest import Manifest
from support.payloads.headers import sealed, text


def test_the_data_begins_on_a_multiple_of_256() -> None:
    whole = sealed(text())
    assert Manifest.decode(whole).tensors
    length = int.from_bytes(whole[:8], "little")
    longer = struct.pack("<Q", length + 8) + whole[8 : 8 + length] + b" " * 8 + whole[8 + length :]
    with pytest.raises(WireError, match="not on a multiple of 256"):
        Manifest.decode(longer)


def test_a_tensor_keeps_to_what_was_allocated_for_it() -> None:
    def plan(tokens: int, capacity: Manifest | None = None) -> Manifest:
        tensors = [("kv.0.key", "F32", (tokens, 2, 4))]
        return Manifest.lay_out("r", [], tensors, bundle=False, capacity=capacity)

    capacity = plan(3).as_capacity()
    assert plan(2, capacity).tensors[0].nbytes == 64
    with pytest.raises(SchemaError, match="128 bytes, allocated were 96"):
        plan(4, capacity)
