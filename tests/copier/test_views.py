"""Views of a payload that the native library makes: what they are, and how long they live."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import KVCacheBundle, KVCacheTransferData, TensorTransferData
from omni_kvlink._native import dlpack, host
from omni_kvlink.copier import NativeCopier
from omni_kvlink.errors import NativeError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload import tensor_memory
from omni_kvlink.payload.bundle import open_payload
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.testing.caches import Recipe
from support.devices.native_plans import NEEDS_LIBRARY

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.payload.bundle import Payload

# Reaches into _BY_CODE, _MAKE: torch's types by their codes, and whether this torch has the
# exchange API at all.

pytestmark = [
    NEEDS_LIBRARY,
    pytest.mark.skipif(not tensor_memory._MAKE, reason="this torch has no DLPack exchange API"),
]


def every_dtype() -> TensorTransferData:
    tensors = {
        code: torch.arange(6).view(3, 1, 2).to(dtype)
        for code, dtype in tensor_memory._BY_CODE.items()
    }
    odd = {"none": torch.zeros(0, 5), "scalar": torch.tensor(7), "nested": [torch.ones(2)]}
    return TensorTransferData("r", tensors | odd)


def cache(*, tokens: int = 4) -> KVCacheTransferData:
    made = Recipe("r", layers=3, tokens=tokens).make()
    assert isinstance(made, KVCacheTransferData)
    return made


def bundle() -> KVCacheBundle:
    return KVCacheBundle("r", {"a": cache(tokens=5), "b": cache(tokens=3)})


def received(data: Payload) -> tuple[Manifest, Region]:
    payload = NativeCopier().pack(data.tensors(), data.plan())
    return Manifest.decode(payload), Region.copy_of(memoryview(payload))


@pytest.mark.parametrize("make", [every_dtype, bundle, cache])
def test_they_are_what_was_put(
    make: Callable[[], Payload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what torch makes of the same memory."""
    put = make()
    manifest, region = received(put)
    by_torch = tensor_memory.tensor_views(region, manifest.tensors, manifest.header_nbytes)
    monkeypatch.setattr(tensor_memory, "tensor_views", None)
    data = open_payload(manifest, region)
    assert type(data) is type(put)
    assert data.difference(put) == ""  # type: ignore[arg-type]
    for found, other in zip(data.tensors(), by_torch, strict=True):
        assert isinstance(found, torch.Tensor)
        assert (found.shape, found.stride(), found.dtype) == (
            *(other.shape, other.stride(), other.dtype),
        )
        assert found.data_ptr() == other.data_ptr() or not found.numel()
        assert not found.requires_grad


def test_the_memory_lives_as_long_as_the_last_of_them() -> None:
    """Whatever was made of it, and whatever thread drops it."""
    manifest, region = received(
        TensorTransferData("r", {"a": torch.ones(4, 2), "b": torch.ones(3)})
    )
    data = open_payload(manifest, region)
    assert isinstance(data, TensorTransferData)
    span = weakref.ref(region.span)
    part, array = data["a"][1:2], data["b"].numpy()
    del data, region
    gc.collect()
    assert span() is not None
    assert (part.tolist(), array.tolist()) == ([[1.0, 1.0]], [1.0, 1.0, 1.0])
    del array
    assert span() is not None
    held = [part]
    del part
    dropping = threading.Thread(target=held.clear)
    dropping.start()
    dropping.join()
    assert span() is None


def test_they_may_be_dropped_without_the_interpreters_lock() -> None:
    """As torch's own threads do: what frees them takes it."""
    manifest, region = received(TensorTransferData("r", {"a": torch.ones(4)}))
    taken = list[int]()
    take = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def make(managed: int, into: int) -> int:
        taken.append(managed)
        ctypes.c_void_p.from_address(into).value = id(None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))
        return 0

    span, owner = weakref.ref(region.span), region.span
    callback = take(make)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert manifest.layout is not None
    packed, data = manifest.layout.packed, manifest.header_nbytes
    assert packed is not None
    assert address is not None
    sizes = region.address + data, region.nbytes - data
    assert packed.make_views(*sizes, range(1), owner, address) == [None]
    del region, owner
    gc.collect()
    assert span() is not None
    free = ctypes.c_void_p.from_address(taken[0] + 16).value
    assert free is not None
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(free)(taken[0])  # gives the lock away meanwhile
    assert span() is None


def test_a_payload_that_is_too_short_is_refused() -> None:
    manifest, region = received(TensorTransferData("r", {"a": torch.ones(4), "b": torch.ones(300)}))
    short = region.slice(0, region.nbytes - 1)
    with pytest.raises(NativeError, match="behind the payload's end"):
        tensor_memory.payload_views(short, manifest)
    with pytest.raises(NativeError, match="does not have"):
        tensor_memory.payload_views(region, manifest, range(1, 3))
    assert len(tensor_memory.payload_views(short, manifest, range(1))) == 1


def test_some_of_them() -> None:
    manifest, region = received(cache())
    every = tensor_memory.payload_views(region, manifest)
    some = tensor_memory.payload_views(region, manifest, range(2, 5))
    assert [one.data_ptr() for one in some] == [one.data_ptr() for one in every[2:5]]
    assert tensor_memory.payload_views(region, manifest, range(0)) == []


def test_a_torch_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    put = cache()
    manifest, region = received(put)
    monkeypatch.setattr(tensor_memory, "_MAKE", 0)
    data = KVCacheTransferData.from_region(manifest, region)
    assert data.difference(put) == ""


def test_what_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, region = received(TensorTransferData("r", {"a": torch.ones(4)}))
    assert manifest.layout is not None
    packed = manifest.layout.packed
    assert packed is not None
    packed._pieces[3] = 99 | 8 << 8 | 1 << 16  # a dtype that nobody has
    with pytest.raises((RuntimeError, BufferError)):
        tensor_memory.payload_views(region, manifest)


def test_a_process_that_ends_with_views() -> None:
    """They are freed when Python has taken most of itself apart."""
    code = """
import torch
from omni_kvlink import TensorTransferData
from omni_kvlink.copier import NativeCopier
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.bundle import open_payload
from omni_kvlink.payload.manifest import Manifest
put = TensorTransferData("r", {"a": torch.ones(4)})
payload = NativeCopier().pack(put.tensors(), put.plan())
torch.kept = open_payload(Manifest.decode(payload), Region.copy_of(memoryview(payload)))["a"]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_interpreter_is_this_one() -> None:
    here = dlpack.Interpreter.current()
    address = here.Py_IsInitialized
    assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == 1
    assert host.missing() is None
