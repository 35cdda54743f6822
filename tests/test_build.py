"""Every way a build can go: with a compiler, with none, with a broken one, with a wish unmet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))

PROBE = """
import warnings
from omni_kvlink import _native
print(_native.missing() or _native.features())
from omni_kvlink.copier.native import NativeCopier, fastest_copier
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(fastest_copier().name, fastest_copier().name, len(caught))
    for warning in caught:
        print(warning.message)
try:
    NativeCopier()
except _native.NativeError as error:
    print("NativeError:", error)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A private copy of what a build needs."""
    for name in ("csrc", "omni_kvlink"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("_kvlink*", "__pycache__")
        )
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build in place, with PATH and CXX as given and nothing inherited of the two."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CXX", "CXXFLAGS", "OMNI_KVLINK_CUDA")}
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_native", "--inplace"],
        cwd=tree,
        env={**kept, **environment},
        capture_output=True,
        text=True,
    )


def probe(tree: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_with_a_compiler(tree: Path) -> None:
    done = build(tree, OMNI_KVLINK_CUDA="auto", CXXFLAGS="-O1")
    assert done.returncode == 0, done.stderr
    assert (tree / "omni_kvlink" / "_kvlink.so").exists()
    assert "warning" not in done.stderr
    lines = probe(tree, OMNI_KVLINK_FEATURES="portable")
    assert lines == ["portable", "torch torch 0"]  # the faster one there, and nothing to warn of
    # An instruction set that is not there is an error for whoever asked for it.
    wished = probe(tree, OMNI_KVLINK_FEATURES="vax")
    assert "'vax'" in wished[0]
    assert wished[1] == "torch torch 1"


def test_without_a_compiler(tree: Path) -> None:
    (tree / "empty").mkdir()
    done = build(tree, PATH=str(tree / "empty"))
    assert done.returncode == 0, done.stderr
    assert "no native copier: no C++ compiler was found" in done.stderr
    why, chosen, warning, error = probe(tree)
    assert "no C++ compiler was found at installation" in why
    assert chosen == "torch torch 1"  # one warning for two uses
    assert warning.startswith(why)
    assert "install a C++17 compiler" in warning
    assert "Copies are made by torch" in warning
    assert error == f"NativeError: {why}"


def test_with_a_broken_compiler(tree: Path) -> None:
    broken = tree / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no such thing' >&2\nexit 3\n")
    broken.chmod(0o755)
    stale = tree / "omni_kvlink" / "_kvlink.so"
    stale.write_text("of an earlier version")
    done = build(tree, CXX=str(broken))
    assert done.returncode == 0, done.stderr
    assert not stale.exists()
    why = probe(tree)[0]
    assert "broken-c++ failed (status 3): fatal error: no such thing" in why
    assert build(tree, CXX="/nowhere/c++").returncode == 0
    assert "/nowhere/c++ cannot be run: No such file" in probe(tree)[0]


def test_a_library_that_is_none(tree: Path) -> None:
    (tree / "omni_kvlink" / "_kvlink.so").write_text("not a library")
    assert "cannot be used" in probe(tree)[0]


@pytest.mark.parametrize(
    ("wish", "answer"),
    [("on", "the CUDA part isn't in this version yet"), ("maybe", "wanted auto, on or off")],
)
def test_cuda_wishes_that_cannot_be_met(tree: Path, wish: str, answer: str) -> None:
    done = build(tree, OMNI_KVLINK_CUDA=wish)
    assert done.returncode != 0
    assert answer in done.stderr
    assert not (tree / "omni_kvlink" / "_kvlink.so").exists()
