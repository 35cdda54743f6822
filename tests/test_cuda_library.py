"""The CUDA library as it was built: it loads without a driver, and says what is missing."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_kvlink._native import cuda as _cuda
from omni_kvlink._native import host as _native
from omni_kvlink.copier import PinnedCopier, fastest_copier
from omni_kvlink.errors import NativeError

HEADER = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "kvlink_cuda.h"
NEEDS_LIBRARY = pytest.mark.skipif(bool(_cuda.missing()), reason=_cuda.missing() or "")
HAS_DEVICE = not _cuda.missing() and not _cuda.no_device()
WITHOUT_DEVICE = pytest.mark.skipif(HAS_DEVICE, reason="there is a CUDA device")


def test_the_interface_has_one_number() -> None:
    found = re.search(r"#define KVLC_ABI (\d+)", HEADER.read_text())
    assert found
    assert int(found[1]) == _cuda.ABI
    assert "KVLC_MEASURED UINT64_MAX\n" in HEADER.read_text()
    assert _cuda._MEASURED == 2**64 - 1


def test_a_built_library_loads() -> None:
    """A library that was built can be used: nothing of it hangs on a driver."""
    if not (Path(_cuda.__file__).parent / _cuda.LIBRARY).exists():
        pytest.skip(_cuda.missing() or "")
    assert _cuda.missing() is None


@NEEDS_LIBRARY
@WITHOUT_DEVICE
def test_without_a_device() -> None:
    reason = _cuda.no_device()
    assert reason
    assert reason.startswith("no CUDA device: ")
    assert "install NVIDIA's driver" in reason
    with pytest.raises(NativeError, match=r"no CUDA device: .*CUDA_VISIBLE_DEVICES"):
        PinnedCopier()
    with pytest.raises(NativeError, match="no CUDA device"):
        _cuda.device_count()


@WITHOUT_DEVICE
def test_nobody_else_is_concerned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error" if _native.missing() is None else "ignore")
        assert fastest_copier().name in ("native", "torch")


def batch(memory: Any, index: Any, payload: Any) -> _cuda.Batch:
    """Three rows of 64 bytes, looked up in a memory of 1024."""
    sizes, strides = (3, 1, 1, 1), (64, 0, 0, 0)
    rows = _native.view_words(memory.ctypes.data, 1024, 64, sizes=sizes, strides=strides)
    view = _native.indexed_view_words(rows, index.ctypes.data, limit=16)
    call = _cuda.Batch(payload.ctypes.data, payload.nbytes)
    call.add(0, 192, view, digest=False)
    return call


@NEEDS_LIBRARY
@pytest.mark.parametrize("verb", ["begin_gather", "begin_scatter"])
def test_arguments_are_checked_before_a_device_is_looked_for(verb: str) -> None:
    memory, payload = np.zeros(1024, np.uint8), np.zeros(192, np.uint8)
    index = np.array([3, 16, 5])
    with pytest.raises(_native.CopyFailed, match=r"copy 0: index\[1\] is 16") as caught:
        getattr(batch(memory, index, payload), verb)(_cuda.Ticket(None), 0, 0)
    assert (caught.value.status, caught.value.copy) == (_native.BOUNDS, 0)
    with pytest.raises(_native.CopyFailed, match="in a payload of 191"):
        getattr(batch(memory, index, payload[:191]), verb)(_cuda.Ticket(None), 0, 0)
    index[1] = 4
    if not HAS_DEVICE:
        with pytest.raises(_native.CopyFailed, match="no CUDA device"):
            getattr(batch(memory, index, payload), verb)(_cuda.Ticket(None), 0, 0)


@NEEDS_LIBRARY
def test_no_such_ticket() -> None:
    ticket = _cuda.Ticket(None)
    ticket.finish()  # nothing was begun
    ticket = _cuda.Ticket(None)
    ticket._number.value = 10**6
    for call in (lambda: ticket.wait(0), ticket.complete, ticket.finish):
        with pytest.raises(NativeError, match="no ticket 1000000"):
            call()
    ticket.finish()  # the second time there is nothing to do


@pytest.mark.parametrize("text", ["-1", "16k", "1.5", str(2**64 - 1), "٣"])
def test_a_crossover_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(_cuda.ENVIRONMENT, text)
    with pytest.raises(NativeError, match=r"OMNI_KVLINK_CUDA_CROSSOVER=.*a number of bytes"):
        _cuda.crossover()


def test_the_crossover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_cuda.ENVIRONMENT, "4096")
    assert _cuda.crossover() == 4096
    monkeypatch.delenv(_cuda.ENVIRONMENT)
    assert _cuda.crossover() == 2**64 - 1


def test_a_library_that_is_missing_or_another(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match=r"there is no _kvlink_cuda\.so in it; install the CUDA"):
        _cuda._part.open(tmp_path)
    (tmp_path / _cuda.EXCUSE).write_text("nvcc failed\n")
    with pytest.raises(NativeError, match="has no CUDA part: nvcc failed; install the CUDA"):
        _cuda._part.open(tmp_path)
    (tmp_path / _cuda.LIBRARY).write_text("no library")
    with pytest.raises(NativeError, match="cannot be used"):
        _cuda._part.open(tmp_path)


@NEEDS_LIBRARY
def test_a_library_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(Path(_cuda.__file__).parent / _cuda.LIBRARY, tmp_path)
    monkeypatch.setattr(_cuda._part, "abi", _cuda.ABI + 1)
    with pytest.raises(NativeError, match=f"has interface {_cuda.ABI}, this package wants"):
        _cuda._part.open(tmp_path)


def test_torch_and_the_library_agree() -> None:
    """Whoever has a device in torch, and the library, gets the pinned copier."""
    chosen = fastest_copier().name == "pinned"
    assert chosen == (HAS_DEVICE and torch.version.cuda is not None and torch.cuda.is_available())
