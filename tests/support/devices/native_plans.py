"""Fixtures of the native copier's tests: plans without a schema, memory before a locked page."""

from __future__ import annotations

import ctypes
import mmap
import platform
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from omni_kvlink._native import host
from omni_kvlink.errors import NativeError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_kvlink.payload.views import TensorView

X86, ARM = ("avx2", "avx512", "avx512+clmul"), ("neon",)
FEATURES = ("portable", *(ARM if platform.machine() == "aarch64" else X86))
NEEDS_LIBRARY = pytest.mark.skipif(bool(host.missing()), reason=host.missing() or "")
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process run without the compiled library, as if none had been built."""
    # Not public: it is looked for once, when the first call needs it.
    monkeypatch.setattr(host._part, "loaded", None)
    monkeypatch.setattr(host._part, "_why", "there is none")  # as above


@contextmanager
def using(features: str) -> Iterator[None]:
    """Run the block with one instruction set; skip the test if the processor lacks it."""
    try:
        host.select(features)
    except NativeError as error:
        pytest.skip(str(error))
    try:
        yield
    finally:
        host.select("auto")


def plan_of(tensors: Sequence[TensorView], *, digests: bool = True) -> Manifest:
    """A plan with one tensor after another, which is all that copiers need of a manifest."""
    named = [
        (f"kv.{layer}.key", DTYPES[tensor.dtype], tuple(tensor.shape))
        for layer, tensor in enumerate(tensors)
    ]
    return Manifest.lay_out("request", [], named, bundle=False, digests=digests)


class Locked:
    """Memory that ends where an inaccessible page begins."""

    def __init__(self, nbytes: int):
        page = mmap.PAGESIZE
        pages = -(-nbytes // page) * page
        self._pages = mmap.mmap(-1, pages + page)
        start = np.frombuffer(self._pages, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(start + pages), page, 0) == 0
        self.address = start + pages - nbytes
        self.region = Region(self.address, nbytes, self._pages)
        self.bytes = np.frombuffer(self.region.view(), np.uint8)


def noise(nbytes: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def tensor_of(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern there is, NaNs included."""
    size = torch.empty(0, dtype=dtype).element_size()
    flat = torch.from_numpy(noise(int(np.prod(shape)) * size, seed))
    return flat.view(dtype).view(*shape)


def as_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()
