"""The extraction benchmark: its figures, its pictures, and every measurement on a fake device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink._native import cuda
from omni_kvlink.bench.stats import Summary
from support.devices.fake_device import device as device
from support.devices.fake_device import directory as directory
from support.devices.native_plans import NEEDS_LIBRARY

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_extraction.py"
sys.path[:0] = [str(SCRIPT.parent)]

import gpu_extraction  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.devices.fake_device import FakeDevice

pytestmark = NEEDS_LIBRARY
HAS_DEVICE = not cuda.missing() and not cuda.no_device()


def summaries(**values: float) -> dict[str, Summary]:
    found = dict.fromkeys(gpu_extraction.MEANING, 100.0)
    found |= {name.replace("_", " "): value for name, value in values.items()}
    return {name: Summary.of([value, 3 * value, 0.5 * value]) for name, value in found.items()}


def test_the_figures() -> None:
    found = summaries(plain_out=9.0, gather=10.0, plain_in=8.0, scatter=16.0)
    found["gather, loaded"] = Summary.of([200.0])
    found["gather, in turn"] = Summary.of([125.0])
    found["scatter, in turn"] = Summary.of([400.0])
    found["pass, streamed"] = Summary.of([100.5])
    found["streamed"] = Summary.of([104.0])
    found["one after the other"] = Summary.of([110.0])
    read = gpu_extraction.figures(found)
    assert read["rate_of_plain_out"] == 0.9
    assert read["rate_of_plain_in"] == 0.5
    assert read["rate_of_plain_out_loaded"] == 0.5
    assert read["rate_of_plain_out_in_turn"] == 0.8
    assert read["rate_of_plain_in_in_turn"] == 0.25
    assert read["added_streamed_ms"] == 0.5
    assert read["streamed_after_pass_ms"] == 4.0
    assert read["added_after_ms"] == 10.0


def test_the_table() -> None:
    found = summaries(plain_out=9.0, gather=10.0)
    found["pass, streamed"] = Summary.of([100.5])
    shown = gpu_extraction.text("28 layers", 235_000_000, found, outlasted=2)
    assert "28 layers: 235 MB" in shown
    gathered = next(line for line in shown.splitlines() if line.startswith("gather  "))
    assert gathered.split()[:5] == ["gather", "10.000", "5.000", "30.000", "23.5"]
    assert "out: 0.90 of a plain copy's rate (bar: 0.90)" in shown
    assert "added to the forward pass: 0.500 ms streamed (bar: 1)" in shown
    assert "2 copies took longer than the multiplications beside them" in shown
    assert "took longer" not in gpu_extraction.text("28 layers", 1, found, outlasted=0)


def test_the_multiplications_outlast_the_copy() -> None:
    assert gpu_extraction.multiplications(0.5, plain=1.0) == 40  # 20 ms at least
    assert gpu_extraction.multiplications(0.5, plain=10.0) == 120  # six times the copy


def test_the_pictures(tmp_path: Path) -> None:
    ms = {name: summary.to_dict() for name, summary in summaries(plain_out=10.0).items()}
    results = {"28 layers × 4096 tokens, paged": {"nbytes": 100_000_000, "ms": ms}}
    written = gpu_extraction.draw(tmp_path, results)
    assert [path.name for path in written] == [
        "28x4096-paged-copies.svg",
        "28x4096-paged-passes.svg",
    ]
    copies, passes = (path.read_text() for path in written)
    assert ">plain out<" in copies
    assert ">10<" in copies  # GB/s of 100 MB in 10 ms
    assert ">pass, streamed<" in passes
    assert ">plain out<" not in passes


class HostClock:
    """Stands in for `Device`: work on the engine's stream is done at once."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(synchronize=lambda: None)
        self.spans = 0

    def milliseconds(self, action: Callable[[], object]) -> float:
        action()
        return 1.0

    milliseconds_beside = milliseconds

    def span(self, action: Callable[[], object]) -> tuple[SimpleNamespace, SimpleNamespace]:
        self.spans += 1
        action()
        end = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
        return SimpleNamespace(elapsed_time=lambda end: 2.0), end

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_every_measurement(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, paged: bool
) -> None:
    monkeypatch.setattr(gpu_extraction, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_extraction, "WIDTH", 8)
    clock = HostClock()
    cache = gpu_extraction.Cache(2, 40, paged=paged, device=clock)  # type: ignore[arg-type]
    cache.region.view()[cache.plan.header_nbytes :] = bytes(
        cache.region.nbytes - cache.plan.header_nbytes
    )
    # One measurement without its clock: all of them together are checked below.
    cache._streamed()
    cache.copier.verify(cache.manifest, cache.region)  # every layer was taken out
    found = gpu_extraction.measure(cache, 2)
    assert list(found) == list(gpu_extraction.MEANING)
    assert found["gather"].p50 == found["gather, in turn"].p50 == 1.0
    assert found["pass"].p50 == found["pass, streamed"].p50 == 2.0
    assert cache.outlasted == 6  # three copies of two rounds: that clock's load is always over
    assert clock.spans > 0
    assert gpu_extraction.text("shape", cache.nbytes, found, cache.outlasted)


def test_the_device_is_described(device: FakeDevice) -> None:
    about = gpu_extraction.describe()
    assert about["device"] == "cuda 13.0, Fake"
    assert about["readonly_mapping"] == "page-locked"
    assert len(about["crossovers_bytes"]) == 2
    with device.set("refuses_registration", 1):
        assert "cudaHostRegister" in gpu_extraction.describe()["readonly_mapping"]


@pytest.mark.skipif(HAS_DEVICE, reason="there is a CUDA device")
def test_without_a_device() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("nothing was measured: ")
    assert done.stdout == ""


def test_it_has_a_device_only_if_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setattr(cuda, "no_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_extraction.missing() == "torch has no CUDA, or sees no device"
