"""Builds with a compiler, without one, with a broken one, and with options that cannot be met."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from omni_kvlink._native.loader import CompiledPart

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="installed without the sources"
)
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))

PROBE = """
import warnings
from omni_kvlink._native import host
print(host.missing() or host.features())
from omni_kvlink.copier import NativeCopier, fastest_copier
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(fastest_copier().name, fastest_copier().name, len(caught))
    for warning in caught:
        print(warning.message)
try:
    NativeCopier()
except host.NativeError as error:
    print("NativeError:", error)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A private copy of the files that a build needs."""
    for name in ("csrc", "omni_kvlink"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("_kvlink*", "__pycache__")
        )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build in place with the given compilers only; without CUDA by default."""
    own = ("CXX", "CXXFLAGS", "CUDACXX", "NVCC", "CUDA_HOME")
    kept = {k: v for k, v in os.environ.items() if k not in own} | {"OMNI_KVLINK_CUDA": "off"}
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_native", "--inplace"],
        cwd=tree,
        env={**kept, **environment},
        capture_output=True,
        text=True,
    )


def probe(tree: Path, program: str = PROBE, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_with_a_compiler(tree: Path) -> None:
    done = build(tree, CXXFLAGS="-O1")
    assert done.returncode == 0, done.stderr
    assert (tree / "omni_kvlink" / "_native" / "_kvlink.so").exists()
    assert "warning" not in done.stderr
    lines = probe(tree, OMNI_KVLINK_FEATURES="portable")
    assert lines == ["portable", "native native 0"]
    # An instruction set that the processor lacks is an error.
    forced = probe(tree, OMNI_KVLINK_FEATURES="vax")
    assert "'vax'" in forced[0]
    assert forced[1] == "torch torch 1"


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
    stale = tree / "omni_kvlink" / "_native" / "_kvlink.so"
    stale.write_text("of an earlier version")
    done = build(tree, CXX=str(broken))
    assert done.returncode == 0, done.stderr
    assert not stale.exists()
    why = probe(tree)[0]
    assert "broken-c++ failed (status 3): fatal error: no such thing" in why
    assert build(tree, CXX="/nowhere/c++").returncode == 0
    assert "/nowhere/c++ cannot be run: No such file" in probe(tree)[0]


def test_what_is_built_already_is_kept(tree: Path) -> None:
    """Until a source, a setting or the compiler changes."""
    cxx = script(tree, "c++", WRITES)

    def calls(**environment: str) -> int:
        assert build(tree, CXX=cxx, **environment).returncode == 0
        return len(Path(f"{cxx}.calls").read_text().splitlines())

    assert [calls(), calls()] == [1, 1]
    library = tree / "omni_kvlink" / "_native" / "_kvlink.so"
    library.write_text("damaged")
    assert [calls(), calls()] == [2, 2]
    library.unlink()
    assert [calls(), calls()] == [3, 3]
    source = tree / "csrc" / "view.cpp"
    source.write_text(f"{source.read_text()}\n")
    assert [calls(), calls()] == [4, 4]
    assert calls(CXXFLAGS="-O1") == 5
    assert calls() == 6
    os.utime(cxx, (1, 1))
    assert calls() == 7


def test_a_file_that_is_no_library(tree: Path) -> None:
    (tree / "omni_kvlink" / "_native" / "_kvlink.so").write_text("not a library")
    assert "cannot be used" in probe(tree)[0]


# ---- the CUDA part; the compilers are scripts

CUDA_PROBE = """
from omni_kvlink._native import cuda
print(cuda.missing())
"""
WRITES = """#!/bin/sh
if [ "$1" = --list-gpu-code ]; then printf 'sm_75\\nsm_80\\nsm_86\\nsm_90\\nsm_100\\n'; exit; fi
echo "$@" >> "$0.calls"
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""
BREAKS = """#!/bin/sh
echo 'nvcc fatal   : error: unsupported host compiler' >&2
exit 2
"""


def script(tree: Path, name: str, text: str) -> str:
    path = tree / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def built(tree: Path) -> list[str]:
    paths = (tree / "omni_kvlink" / "_native").glob("_kvlink*")
    return sorted(path.name for path in paths if path.suffix != ".built")


def test_with_nvcc(tree: Path) -> None:
    nvcc, cxx = script(tree, "nvcc", WRITES), script(tree, "c++", WRITES)
    for options in ({"CUDACXX": nvcc}, {"NVCC": nvcc}, {"PATH": f"{tree}:{os.environ['PATH']}"}):
        done = build(tree, OMNI_KVLINK_CUDA="auto", CXX=cxx, **options)
        assert done.returncode == 0, done.stderr
        assert built(tree) == ["_kvlink.so", "_kvlink_cuda.so"]
        (tree / "omni_kvlink" / "_native" / "_kvlink_cuda.so").unlink()
    (tree / "bin").mkdir()
    shutil.move(nvcc, tree / "bin" / "nvcc")
    shutil.move(f"{nvcc}.calls", tree / "bin" / "nvcc.calls")
    home = {"CUDA_HOME": str(tree), "PATH": without_nvcc()}
    assert build(tree, OMNI_KVLINK_CUDA="on", CXX=cxx, **home).returncode == 0
    assert "_kvlink_cuda.so" in built(tree)
    calls = (tree / "bin" / "nvcc.calls").read_text().splitlines()
    assert len(calls) == 8
    kernel, library = calls[:2]
    for flag in ("code=sm_75", "code=sm_80", "code=sm_90", "code=sm_100", "kernel.cu"):
        assert flag in kernel
    assert "arch=compute_90,code=compute_90" in kernel  # other devices translate it
    assert "sm_70" not in kernel  # this nvcc does not know it
    assert "sm_86" not in kernel  # runs the code of sm_80
    assert "-ccbin" not in kernel  # nvcc takes fewer compilers for it than for C++
    for flag in (f"-ccbin {cxx}", "-cudart static", "api.cpp", "kernel.o"):
        assert flag in library
    assert build(tree, OMNI_KVLINK_CUDA="on", CXX=f"{cxx} -g", **home).returncode == 0
    assert "-ccbin" not in (tree / "bin" / "nvcc.calls").read_text().splitlines()[-1]


def test_with_an_nvcc_that_cannot_list_what_it_knows(tree: Path) -> None:
    text = WRITES.replace("printf ", "false; exit 1; printf ")
    nvcc, cxx = script(tree, "nvcc", text), script(tree, "c++", WRITES)
    assert build(tree, OMNI_KVLINK_CUDA="on", CXX=cxx, CUDACXX=nvcc).returncode == 0
    kernel = Path(f"{nvcc}.calls").read_text().splitlines()[0]
    assert "sm_75" in kernel
    assert "arch=compute_80,code=compute_80" in kernel
    assert "sm_90" not in kernel


def without_nvcc() -> str:
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not shutil.which("nvcc", path=folder))


def test_without_nvcc(tree: Path) -> None:
    """Only the native copier is built; a line and a note say how to get the CUDA part."""
    cxx = script(tree, "c++", WRITES)
    nowhere = {"PATH": without_nvcc(), "CUDA_HOME": "/nowhere", "CXX": cxx}
    done = build(tree, OMNI_KVLINK_CUDA="auto", **nowhere)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("omni_kvlink: ")]
    assert len(lines) == 1
    assert "no CUDA part: no nvcc was found" in lines[0]
    assert built(tree) == ["_kvlink.so", "_kvlink_cuda.missing"]
    (why,) = probe(tree, program=CUDA_PROBE)
    assert "no nvcc was found at installation (not on PATH, not in /nowhere/bin)" in why
    assert "install the CUDA toolkit" in why
    done = build(tree, OMNI_KVLINK_CUDA="on", **nowhere)
    assert done.returncode != 0
    assert "OMNI_KVLINK_CUDA=on, but no nvcc was found" in done.stderr
    assert "install the CUDA toolkit" in done.stderr


def test_with_a_broken_nvcc(tree: Path) -> None:
    cxx, nvcc = script(tree, "c++", WRITES), script(tree, "broken-nvcc", BREAKS)
    (tree / "omni_kvlink" / "_native" / "_kvlink_cuda.so").write_text("of an earlier version")
    done = build(tree, OMNI_KVLINK_CUDA="auto", CXX=cxx, CUDACXX=nvcc)
    assert done.returncode == 0, done.stderr
    assert built(tree) == ["_kvlink.so", "_kvlink_cuda.missing"]
    assert "broken-nvcc failed (status 2): nvcc fatal" in probe(tree, program=CUDA_PROBE)[0]
    for option, status in (("auto", 0), ("on", 1)):
        done = build(tree, OMNI_KVLINK_CUDA=option, CXX=cxx, CUDACXX="/nowhere/nvcc")
        assert done.returncode == status
        assert "/nowhere/nvcc cannot be run: No such file" in done.stderr
    done = build(tree, OMNI_KVLINK_CUDA="on", CXX=cxx, CUDACXX=nvcc)
    assert done.returncode != 0
    assert "unsupported host compiler; install the CUDA toolkit" in done.stderr


def test_with_cuda_switched_off(tree: Path) -> None:
    """Also if it was built before, from the same sources."""
    cxx, nvcc = script(tree, "c++", WRITES), script(tree, "nvcc", WRITES)
    build(tree, OMNI_KVLINK_CUDA="auto", CXX=cxx, CUDACXX=nvcc)
    assert "_kvlink_cuda.so" in built(tree)
    done = build(tree, OMNI_KVLINK_CUDA="off", CXX=cxx, CUDACXX=nvcc)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert built(tree) == ["_kvlink.so", "_kvlink_cuda.missing"]
    assert "switched off at installation" in probe(tree, program=CUDA_PROBE)[0]


def test_cuda_without_a_host_part(tree: Path) -> None:
    """A missing C++ compiler is an error only with OMNI_KVLINK_CUDA=on."""
    nvcc = script(tree, "nvcc", WRITES)
    for option, status in (("auto", 0), ("on", 1)):
        done = build(tree, OMNI_KVLINK_CUDA=option, CXX="/nowhere/c++", CUDACXX=nvcc)
        assert done.returncode == status
        assert built(tree) == ["_kvlink.missing", "_kvlink_cuda.missing"]
        assert "it needs the native copier, and there is none" in done.stderr


def test_an_unknown_cuda_option(tree: Path) -> None:
    done = build(tree, OMNI_KVLINK_CUDA="maybe")
    assert done.returncode != 0
    assert "use auto, on or off" in done.stderr
    assert built(tree) == []


def test_the_reason_of_a_missing_library_keeps_no_frame_alive() -> None:
    part = CompiledPart("part", "_none.so", 1, "build it", lambda library: 1)

    class Local:
        pass

    def caller() -> weakref.ref[Local]:
        local = Local()
        assert part.missing()
        return weakref.ref(local)

    assert caller()() is None
