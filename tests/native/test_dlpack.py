"""What torch says of its tensors by DLPack, and the table of dtypes that it is compared with."""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import Any

import pytest
import torch

from omni_kvlink._native import dlpack
from omni_kvlink.payload.dtypes import DLPACK, DTYPES

# Reaches into _CAPSULE, _ExchangeApi: a table like torch's, of versions that no torch here has.

_CAPSULE = ctypes.create_string_buffer(dlpack._CAPSULE)


def capsule_of(api: dlpack._ExchangeApi) -> Any:
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    return new(ctypes.addressof(api), _CAPSULE, None)


def test_the_dtypes_are_torchs() -> None:
    assert set(DLPACK) == set(DTYPES.values())
    describe = dlpack.describer_of(torch.Tensor)
    if not describe:
        pytest.skip("this torch has no DLPack exchange API")
    call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(describe)
    for name, code in DTYPES.items():
        tensor, memory = torch.zeros(2, 3).to(getattr(torch, name)), (ctypes.c_uint8 * 48)()
        assert call(tensor, memory) == 0
        address, device, _, rank, *dtype = struct.unpack_from("PiiiBBH", memory)
        assert (address, device, rank) == (tensor.data_ptr(), 1, 2)
        assert tuple(dtype) == (*DLPACK[code], 1)


def test_who_has_no_describer(monkeypatch: pytest.MonkeyPatch) -> None:
    api = dlpack._ExchangeApi(major=1, minor=3, describe=77)
    found = type("Found", (), {"__dlpack_c_exchange_api__": capsule_of(api)})
    assert dlpack.describer_of(found) == 77
    monkeypatch.setattr(sys.implementation, "name", "pypy")
    assert dlpack.describer_of(found) == 0
    monkeypatch.undo()
    api.major = 2
    assert dlpack.describer_of(found) == 0
    api.major, api.describe = 1, None
    assert dlpack.describer_of(found) == 0
    assert dlpack.describer_of(int) == 0
    other = type("Other", (), {"__dlpack_c_exchange_api__": 77})
    assert dlpack.describer_of(other) == 0
