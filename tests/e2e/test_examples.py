"""What the README shows runs: its code, and the demo with a verdict that can be lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "bagel_two_stage.py"


def run_demo(out: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    name = f"shm://demo-{os.getpid()}"
    command = [sys.executable, str(DEMO), "--out", str(out), "--connector", name, "--steps", "4"]
    return subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


def test_the_readmes_code_runs(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code
    assert code[1].count("\n") <= 30
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code[1]],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "28 layers × 4096 tokens, bfloat16" in done.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_demo_ends_with_images_and_a_good_verdict(tmp_path: Path, dtype: str) -> None:
    done = run_demo(tmp_path, "--dtype", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("K/V   bit-exact") == 2
    assert done.stdout.count("image bit-exact") == 2
    assert "bytes not sent" in done.stdout
    for name in ("text-to-image", "image-edit"):
        low, high = Image.open(tmp_path / f"{name}.png").convert("L").getextrema()
        assert low < high, f"{name} is one flat colour"


def test_the_demo_fails_loudly_when_a_stage_dies(tmp_path: Path) -> None:
    done = run_demo(tmp_path, OMNI_KVLINK_FAULT="put.copied=kill")
    assert done.returncode == 1
    assert "the ar stage failed with status -9" in done.stdout
    assert "the dit stage failed" in done.stdout
    assert "bit-exact" not in done.stdout
