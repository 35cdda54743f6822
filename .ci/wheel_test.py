"""Installs a distribution into an empty environment without a compiler, and tests it there.

    python3 .ci/wheel_test.py dist/omni_kvlink-….whl [TEST …]

The environment, a copy of the tests, of the benchmarks that they import and of pytest's options lie
outside this checkout, and PATH has no compiler. The package must come from the environment, with
the native copier and, if the wheel has it, the CUDA part. The tests named run after that, and with
a wheel `kvlink-bench verify`.
An sdist instead must install without its compiled parts, and work with torch's copier.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "safetensors")
COMPILER = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|c[89]9|clang|clang\+\+|nvcc|zig)(-[\d.]+)?")
VECTORS = re.search(r"\b(avx2|crc32)\b", Path("/proc/cpuinfo").read_text())
IDENTITY = """
import sys, warnings
import omni_kvlink
from omni_kvlink._native import cuda, host
from omni_kvlink.copier import fastest_copier
warnings.simplefilter("ignore")
print(omni_kvlink.__file__)
print(fastest_copier().name, host.missing() or host.features())
print(cuda.missing() or "CUDA part")
"""


def main() -> None:
    """Install, check, test."""
    distribution = Path(sys.argv[1]).resolve()
    if not distribution.exists():
        raise SystemExit(f"there is no {sys.argv[1]}; `make wheel` builds it")
    with tempfile.TemporaryDirectory(prefix="wheel-") as scratch:
        folder = Path(scratch)
        python = install(distribution, folder)
        check_identity(distribution, folder, python)
        for name in ("tests", "benchmarks", "pyproject.toml"):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / "copy" / name)
        if sys.argv[2:]:
            pytest = (python, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider")
            run(folder, *pytest, *sys.argv[2:])
        if distribution.suffix == ".whl":
            run(folder, python.with_name("kvlink-bench"), "verify")


def install(distribution: Path, folder: Path) -> Path:
    """Make an environment of the distribution, torch and pytest; return its interpreter."""
    (folder / "copy").mkdir()
    venv.create(folder / "env", with_pip=True)
    without_compilers(folder / "bin")
    python = folder / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    run(folder, *pip, "torch")  # first and alone: its pin decides between a CPU wheel and CUDA
    run(folder, *pip, f"{distribution}[bench]", *TOOLS)
    return python


def without_compilers(folder: Path) -> None:
    """Make a folder of links to every program on PATH that is no compiler."""
    folder.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*"):
            link = folder / program.name
            if not COMPILER.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    for name in ("c++", "g++", "clang++", "nvcc"):
        if found := shutil.which(name, path=folder):
            raise SystemExit(f"there is a compiler left: {found}")


def check_identity(distribution: Path, folder: Path, python: Path) -> None:
    """Check which package is imported, and which copier it has."""
    file, copier, cuda = run(folder, python, "-c", IDENTITY).splitlines()
    print(f"{file}\n{copier}\n{cuda}", flush=True)
    is_wheel = distribution.suffix == ".whl"
    names = zipfile.ZipFile(distribution).namelist() if is_wheel else []
    has_cuda = any(name.endswith("_kvlink_cuda.so") for name in names)
    problems = {
        "it is imported from another place": not Path(file).is_relative_to(folder / "env" / "lib"),
        "another copier is used": not copier.startswith("native " if is_wheel else "torch "),
        "the copier ignores this processor's vectors": VECTORS and copier == "native portable",
        "the CUDA part does not load": has_cuda and cuda != "CUDA part",
    }
    if found := [name for name, is_so in problems.items() if is_so]:
        raise SystemExit("; ".join(found))


def run(folder: Path, *command: str | Path) -> str:
    """Run a command beside the copied tests; return its output, or end with its status."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for name in ("CXX", "CUDACXX", "NVCC"):
        kept.pop(name, None)
    path = f"{folder / 'env' / 'bin'}{os.pathsep}{folder / 'bin'}"
    environment = {**kept, "PATH": path, "CUDA_HOME": str(folder / "none")}
    is_program = command[1] == "-c"
    print("+", *(command[:2] if is_program else command), flush=True)
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder / "copy",
        env=environment,
        stdout=subprocess.PIPE if is_program else None,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"status {done.returncode}")
    return done.stdout or ""


if __name__ == "__main__":
    main()
