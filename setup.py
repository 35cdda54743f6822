"""Builds the native copier beside the Python package; all else is declared in pyproject.toml.

The compiled part is an ordinary shared library (no Python headers), so one wheel serves every
Python 3. It is an optimisation: without a compiler the installation succeeds, and the package
says at first use what is missing. OMNI_KVLINK_CUDA=auto|on|off is reserved for the CUDA part.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.build import build
from setuptools.errors import SetupError

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
LIBRARY, EXCUSE = "_kvlink.so", "_kvlink.missing"  # as omni_kvlink/_native.py knows them
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall"]


class NoLibrary(Exception):
    """The library cannot be built here; says why."""


class build_native(Command):
    """Compile csrc into omni_kvlink/_kvlink.so, or leave a note that says why not."""

    description = "compile the native copier"
    user_options = [("inplace", "i", "put it into the source tree")]  # noqa: RUF012
    boolean_options = ["inplace"]  # noqa: RUF012

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False
        self.inplace = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        check_cuda_wish(os.environ.get("OMNI_KVLINK_CUDA", "auto"))
        package = self._package()
        package.mkdir(parents=True, exist_ok=True)
        library, excuse = package / LIBRARY, package / EXCUSE
        excuse.unlink(missing_ok=True)
        try:
            compile_library(library)
        except NoLibrary as why:
            library.unlink(missing_ok=True)  # an older one would not fit these sources
            excuse.write_text(f"{why}\n")
            print(f"omni_kvlink: no native copier: {why}; torch will copy", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        files = [self._package() / name for name in (LIBRARY, EXCUSE)]
        return [str(file) for file in files if file.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(file.relative_to(ROOT)) for file in sorted((ROOT / "csrc").rglob("*.*"))]

    def _package(self) -> Path:
        in_tree = self.inplace or self.editable_mode
        return (ROOT if in_tree else Path(self.build_lib or "build")) / "omni_kvlink"


def check_cuda_wish(wish: str) -> None:
    if wish not in ("auto", "on", "off"):
        raise SetupError(f"OMNI_KVLINK_CUDA={wish}; wanted auto, on or off")
    if wish == "on":
        raise SetupError(
            "OMNI_KVLINK_CUDA=on, but the CUDA part isn't in this version yet; "
            "use auto or off: device tensors are copied by torch"
        )


def compile_library(target: Path) -> None:
    """One call of the compiler for a handful of files, into a temporary name: all or nothing."""
    compiler = find_compiler()
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    sources = [str(file) for file in sorted((ROOT / "csrc").glob("*.cpp"))]
    extra = shlex.split(os.environ.get("CXXFLAGS", ""))
    command = [*compiler, *FLAGS, *extra, *sources, "-o", str(draft)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not draft.exists():
            print(done.stderr, file=sys.stderr)
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            reason = (lines or done.stderr.splitlines() or ["no message"])[0].strip()
            raise NoLibrary(f"{compiler[0]} failed (status {done.returncode}): {reason}")
        os.replace(draft, target)
    except OSError as error:
        raise NoLibrary(f"{compiler[0]} cannot be run: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)


def find_compiler() -> list[str]:
    wish = shlex.split(os.environ.get("CXX", ""))
    if wish:
        return wish
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NoLibrary("no C++ compiler was found at installation (none of c++, g++, clang++)")


class build_all(build):
    sub_commands = [*build.sub_commands, ("build_native", None)]  # noqa: RUF012


class wheel_for_any_python(bdist_wheel):
    """The library depends on the platform and on no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", platform


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=PlatformDistribution,
    cmdclass={
        "build": build_all,
        "build_native": build_native,
        "bdist_wheel": wheel_for_any_python,
    },
)
