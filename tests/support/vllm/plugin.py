"""The package's entry points, as an installation has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GROUP = "vllm.general_plugins"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the entry points of pyproject.toml, as an installation has them."""
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"][GROUP].items()]
    info = tmp_path / "omni_kvlink-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: omni-kvlink\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    return tmp_path


def python_path(installed: Path) -> dict[str, str]:
    """The environment in which it is found."""
    return {"PYTHONPATH": os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])}
