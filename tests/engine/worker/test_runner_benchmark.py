"""The benchmark of the runner: it runs without a device, says so, and sends what it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.copier import PinnedCopier
from support.devices.fake_device import device as device
from support.devices.fake_device import directory as directory
from support.link.ends import use_copier

if TYPE_CHECKING:
    from support.devices.fake_device import FakeDevice

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "runner.py"
sys.path.insert(0, str(SCRIPT.parent))

import runner  # noqa: E402


def test_on_the_host(tmp_path: Path) -> None:
    document = tmp_path / "runner.json"
    sizes = ["--rounds", "1", "--layers", "2", "3", "--tokens", "20"]
    command = [sys.executable, str(SCRIPT), *sizes, "--json", str(document)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if runner.no_device():
        assert "no device: " in done.stdout
    results = json.loads(document.read_text())["results"]
    assert list(results) == [
        f"{layers} layers × 20 tokens, {kind}" for layers in (2, 3) for kind in ("dense", "paged")
    ]
    assert done.stdout.count("added_after_ms: ") == 4
    for title, result in results.items():
        assert result["nbytes"] > int(title[0]) * 2 * 20 * 4 * 128 * 2
        assert set(result["ms"]) == set(runner.KINDS)


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_on_the_simulated_device(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, paged: bool
) -> None:
    """Layers leave in the step alone that streams them, and leave from the device's memory."""
    root = runner.write_checkpoint(tmp_path, 2, 512)
    stage = runner.Stage(root, 2, 20, block=4, paged=paged, device=torch.device("cpu"))
    try:
        pools = stage.runner.pools
        held = {pool.data_ptr() for pool in [*pools.keys, *pools.values]}
        device.holds = lambda view: getattr(view, "pool", view).data_ptr() in held  # type: ignore[union-attr]
        # The benchmark opens the link itself: its calls are counted, and its copier is another one.
        link = stage._sink.link
        use_copier(PinnedCopier(), link)
        streamed = list[str]()
        stream_put = link.stream_put

        def noted(plan: Any, **options: Any) -> Any:
            streamed.append(stage.kind)
            return stream_put(plan, **options)

        monkeypatch.setattr(link, "stream_put", noted)
        crossed = {}
        for kind in runner.KINDS:
            before = device.crossed_nbytes
            stage.milliseconds(kind)
            crossed[kind] = device.crossed_nbytes - before
        nbytes = 2 * 2 * 20 * 4 * 128 * 2
        assert crossed["step"] == 0
        assert crossed["streamed"] >= nbytes
        assert crossed["at the end"] >= nbytes
        assert streamed == ["streamed"]
        assert link.stats()["memory"]["used"] == 0
    finally:
        stage.close()


def test_what_sending_adds_is_the_median_of_the_rounds() -> None:
    found = {"step": [10.0, 90.0, 20.0], "streamed": [11.0, 95.0, 20.5]}
    assert runner._added(found, "streamed") == 1.0
