"""The CUDA part's sources compile with the functions that each version of the toolkit declares."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
VERSIONS = ("11080", "12000", "12060", "12080", "13000")
EXTREMES = VERSIONS[0], VERSIONS[-1]
"""Versions for which every source is compiled; for the others, those that ask for the version."""
COMPILERS = [shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
COMPILER = next((name for name in COMPILERS if name and shutil.which(name[0])), None)
pytestmark = [
    pytest.mark.skipif(not CSRC.exists(), reason="installed without the sources"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


@pytest.mark.parametrize(
    "version",
    [each if each in EXTREMES else pytest.param(each, marks=pytest.mark.slow) for each in VERSIONS],
)
def test_it_compiles(version: str) -> None:
    assert COMPILER is not None
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    define, include = f"-DCUDART_VERSION={version}", f"-I{CSRC}/tests/fake_cuda"
    every = sorted((CSRC / "cuda").glob("*.cpp"))
    versioned = [path for path in every if "CUDART_VERSION" in path.read_text()]
    assert len(versioned) >= 3
    sources = map(str, every if version in EXTREMES else versioned)
    done = subprocess.run(
        [*COMPILER, *flags, define, include, *sources], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
