"""The CUDA library as it was built: it loads without a driver and says what is missing."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_kvlink._native import cuda, host
from omni_kvlink.copier import PinnedCopier, fastest_copier
from omni_kvlink.errors import NativeError, SchemaError

# Reaches into _MEASURED, _number, _part: the header's number; a ticket that the library never gave
# out; a library beside the one that this process has loaded.

HEADER = Path(__file__).resolve().parents[2] / "csrc" / "cuda" / "kvlink_cuda.h"
NEEDS_LIBRARY = pytest.mark.skipif(bool(cuda.missing()), reason=cuda.missing() or "")
HAS_DEVICE = not cuda.missing() and not cuda.no_device()
WITHOUT_DEVICE = pytest.mark.skipif(HAS_DEVICE, reason="there is a CUDA device")


@pytest.mark.skipif(not HEADER.exists(), reason="installed without the sources")
def test_the_interface_has_one_number() -> None:
    found = re.search(r"#define KVLC_ABI (\d+)", HEADER.read_text())
    assert found
    assert int(found[1]) == cuda.ABI
    assert "KVLC_MEASURED UINT64_MAX\n" in HEADER.read_text()
    assert cuda._MEASURED == 2**64 - 1


def test_a_built_library_loads() -> None:
    """A library that was built loads, also without a driver."""
    if not (Path(cuda.__file__).parent / cuda.LIBRARY).exists():
        pytest.skip(cuda.missing() or "")
    assert cuda.missing() is None


@NEEDS_LIBRARY
@WITHOUT_DEVICE
def test_without_a_device() -> None:
    reason = cuda.no_device()
    assert reason
    assert reason.startswith("no CUDA device: ")
    assert "install NVIDIA's driver" in reason
    with pytest.raises(NativeError, match=r"no CUDA device: .*CUDA_VISIBLE_DEVICES"):
        PinnedCopier()


@WITHOUT_DEVICE
def test_other_copiers_work_without_a_device() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error" if host.missing() is None else "ignore")
        assert fastest_copier().name in ("native", "torch")


def batch(memory: Any, index: Any, payload: Any) -> cuda.DeviceBatch:
    """Make a batch of three rows of 64 bytes, looked up in a memory of 1024."""
    sizes, strides = (3, 1, 1, 1), (64, 0, 0, 0)
    rows = host.packed_view(memory.ctypes.data, 1024, 64, sizes=sizes, strides=strides)
    view = host.packed_indexed_view(rows, index.ctypes.data, limit=16)
    made = cuda.DeviceBatch(payload.ctypes.data, payload.nbytes, cuda.crossover())
    made.add(0, 192, view, digest=False)
    return made


@NEEDS_LIBRARY
@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_arguments_are_checked_before_a_device_is_looked_for(verb: str) -> None:
    memory, payload = np.zeros(1024, np.uint8), np.zeros(192, np.uint8)
    index = np.array([3, 16, 5])
    with pytest.raises(host.CopyFailed, match=r"copy 0: index\[1\] is 16") as caught:
        batch(memory, index, payload).begin(verb, cuda.Ticket(None), 0, 0)
    assert (caught.value.status, caught.value.copy) == (host.BOUNDS, 0)
    with pytest.raises(host.CopyFailed, match="in a payload of 191"):
        batch(memory, index, payload[:191]).begin(verb, cuda.Ticket(None), 0, 0)
    index[1] = 4
    if not HAS_DEVICE:
        with pytest.raises(host.CopyFailed, match="no CUDA device"):
            batch(memory, index, payload).begin(verb, cuda.Ticket(None), 0, 0)


@NEEDS_LIBRARY
def test_no_such_ticket() -> None:
    ticket = cuda.Ticket(None)
    ticket.close()  # nothing was started
    ticket = cuda.Ticket(None)
    ticket._number.value = 10**6
    for call in (ticket.wait, ticket.is_complete, ticket.close):
        with pytest.raises(NativeError, match="no ticket 1000000"):
            call()
    ticket.close()  # a second call does nothing


@pytest.mark.parametrize("text", ["-1", "16x", "1.5", str(2**64 - 1), "٣"])
def test_an_invalid_crossover(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(cuda.ENVIRONMENT, text)
    with pytest.raises(SchemaError, match=r"OMNI_KVLINK_CUDA_CROSSOVER=.*: wanted bytes from 0"):
        cuda.crossover()


def test_the_crossover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda.ENVIRONMENT, "4096")
    assert cuda.crossover() == 4096
    monkeypatch.delenv(cuda.ENVIRONMENT)
    assert cuda.crossover() == 2**64 - 1


def test_a_library_that_is_missing_or_another(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match=r"there is no _kvlink_cuda\.so in it; install the CUDA"):
        cuda._part.open(tmp_path)
    (tmp_path / "_kvlink_cuda.missing").write_text("nvcc failed\n")
    with pytest.raises(NativeError, match="has no CUDA part: nvcc failed; install the CUDA"):
        cuda._part.open(tmp_path)
    (tmp_path / cuda.LIBRARY).write_text("no library")
    with pytest.raises(NativeError, match="cannot be used"):
        cuda._part.open(tmp_path)


@NEEDS_LIBRARY
def test_a_library_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(Path(cuda.__file__).parent / cuda.LIBRARY, tmp_path)
    monkeypatch.setattr(cuda._part, "abi", cuda.ABI + 1)
    with pytest.raises(NativeError, match=f"has interface {cuda.ABI}, this package requires"):
        cuda._part.open(tmp_path)


def test_torch_and_the_library_agree() -> None:
    """With a device in torch, and the library, the pinned copier is chosen."""
    chosen = fastest_copier().name == "pinned"
    assert chosen == (HAS_DEVICE and torch.version.cuda is not None and torch.cuda.is_available())
