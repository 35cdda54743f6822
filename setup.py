"""Builds the compiled parts of the package; everything else is declared in pyproject.toml.

They are ordinary shared libraries without Python headers, so that one wheel serves every Python 3:
the native copier, and the CUDA part if there is nvcc. Both are optional: without a compiler the
installation succeeds, and the package says at first use what is missing.

OMNI_KVLINK_CUDA=auto builds the CUDA part if there is nvcc, =on fails without it, =off skips it.
CXX names the C++ compiler; nvcc compiles the kernel with its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from setuptools import Command, Distribution, setup
from setuptools.command.build import build
from setuptools.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
LIBRARY, CUDA_LIBRARY = "_kvlink.so", "_kvlink_cuda.so"  # as in _native/host.py and cuda.py
EXCUSE = ".missing"  # of the file that says why there is no library; as in _native/loader.py
BUILT = ".built"  # of the file that says what a library in the source tree was built from
SETTINGS = ("CXX", "CXXFLAGS", "CUDACXX", "NVCC", "CUDA_HOME")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall"]
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-pthread,-Wall"]
KERNEL_FLAGS = ["-c", "--threads", "0", "-Wno-deprecated-gpu-targets"]
ARCHITECTURES = (70, 75, 80, 90, 100, 120)
"""Compute capabilities with code of their own, which later ones of the same major version run, too.
The driver translates the PTX of `PORTABLE` for the others."""
PORTABLE = 90
OLDEST_NVCC = (70, 75, 80)
"""What an nvcc knows that cannot list it."""
CUDA_CURE = (
    "install the CUDA toolkit 11.8 or later and a C++17 compiler that it takes (CUDACXX names "
    "nvcc), or use OMNI_KVLINK_CUDA=off: device tensors are copied by torch"
)


class NoLibrary(Exception):
    """The library cannot be built; the text says why."""


class build_native(Command):
    """Compile csrc into the package's libraries; write the reason to a file if that fails."""

    description = "compile the native copier and the CUDA part"
    user_options = [("inplace", "i", "put it into the source tree")]  # noqa: RUF012
    boolean_options = ["inplace"]  # noqa: RUF012

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False
        self.inplace = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        option = os.environ.get("OMNI_KVLINK_CUDA", "auto")
        if option not in ("auto", "on", "off"):
            raise SetupError(f"OMNI_KVLINK_CUDA={option}; use auto, on or off")
        package = self._package()
        package.mkdir(parents=True, exist_ok=True)
        inputs = state_of_inputs() if self._is_in_tree else ""
        why = build_part(package / LIBRARY, compile_host, inputs)
        if why:
            print(f"omni_kvlink: no native copier: {why}; torch will copy", file=sys.stderr)
        if option == "off":
            why = build_part(package / CUDA_LIBRARY, refuse_cuda, "")
        else:
            why = build_part(package / CUDA_LIBRARY, compile_cuda, inputs)
        if why and option == "on":
            raise SetupError(f"OMNI_KVLINK_CUDA=on, but {why}; {CUDA_CURE}")
        if why and option == "auto":
            print(f"omni_kvlink: no CUDA part: {why}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        libraries = [self._package() / name for name in (LIBRARY, CUDA_LIBRARY)]
        files = [file for path in libraries for file in (path, path.with_suffix(EXCUSE))]
        return [str(file) for file in files if file.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(file.relative_to(ROOT)) for file in sorted((ROOT / "csrc").rglob("*.*"))]

    @property
    def _is_in_tree(self) -> bool:
        return self.inplace or self.editable_mode

    def _package(self) -> Path:
        root = ROOT if self._is_in_tree else Path(self.build_lib or "build")
        return root / "omni_kvlink" / "_native"


def build_part(library: Path, compile_to: Callable[[Path], None], inputs: str) -> str | None:
    """Build a library; on failure write the reason to a file beside it, and return it.

    One that was built from the same `inputs` is kept; with "" it is always built.
    """
    excuse, built = library.with_suffix(EXCUSE), library.with_suffix(BUILT)
    excuse.unlink(missing_ok=True)
    if inputs and built.exists() and built.read_text() == record_of(library, inputs):
        return None
    built.unlink(missing_ok=True)
    try:
        compile_to(library)
    except NoLibrary as why:
        library.unlink(missing_ok=True)  # an older one does not match these sources
        excuse.write_text(f"{why}\n")
        return str(why)
    if inputs:
        built.write_text(record_of(library, inputs))
    return None


def record_of(library: Path, inputs: str) -> str:
    """Return what is noted of a library: its inputs and its bytes, which may be damaged later."""
    found = hashlib.sha256(library.read_bytes()).hexdigest() if library.exists() else "nothing"
    return f"{inputs} {found}"


def state_of_inputs() -> str:
    """Return a digest of the sources, the settings and the compilers that are found."""
    state = hashlib.sha256(repr([os.environ.get(name) for name in SETTINGS]).encode())
    for path in [ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*.*"))]:
        state.update(path.read_bytes())
    for find in (find_compiler, find_nvcc):
        with contextlib.suppress(NoLibrary, OSError):
            program = shutil.which(find()[0]) or find()[0]
            state.update(f"{program} {os.stat(program).st_mtime_ns}".encode())
    return state.hexdigest()


def compile_host(target: Path) -> None:
    extra = shlex.split(os.environ.get("CXXFLAGS", ""))
    compile_library([*find_compiler(), *FLAGS, *extra], (ROOT / "csrc").glob("*.cpp"), target)


def compile_cuda(target: Path) -> None:
    if not target.with_name(LIBRARY).exists():
        raise NoLibrary("it needs the native copier, and there is none")
    here, compiler = ROOT / "csrc" / "cuda", find_nvcc()
    nvcc = [*compiler, *NVCC_FLAGS]
    shared = (ROOT / "csrc" / name for name in ("failure.cpp", "view.cpp"))
    with tempfile.TemporaryDirectory() as scratch:
        kernel = Path(scratch, "kernel.o")
        flags = [*KERNEL_FLAGS, *device_code(compiler)]
        compile_library([*nvcc, *flags], here.glob("*.cu"), kernel)
        link = [*nvcc, *host_compiler(), "-shared", "-cudart", "static"]
        compile_library(link, [*here.glob("*.cpp"), *shared, kernel], target)


def device_code(nvcc: list[str]) -> list[str]:
    """Return the options for the architectures that this nvcc knows."""
    command, listing = [*nvcc, "--list-gpu-code"], ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # compiling says what is wrong
        listing = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    known = {int(number) for number in re.findall(r"\bsm_(\d+)\b", listing)} or set(OLDEST_NVCC)
    chosen = [number for number in ARCHITECTURES if number in known]
    portable = max((n for n in chosen if n <= PORTABLE), default=min(known))
    pairs = [(number, f"sm_{number}") for number in chosen] + [(portable, f"compute_{portable}")]
    return [part for n, code in pairs for part in ("-gencode", f"arch=compute_{n},code={code}")]


def host_compiler() -> list[str]:
    """Return the option that names CXX to nvcc, which takes no command of several words."""
    named = shlex.split(os.environ.get("CXX", ""))
    return ["-ccbin", named[0]] if len(named) == 1 else []


def refuse_cuda(target: Path) -> None:
    raise NoLibrary("it was switched off at installation (OMNI_KVLINK_CUDA=off)")


def compile_library(compiler: list[str], sources: Iterable[Path], target: Path) -> None:
    """Compile all files in one call, into a temporary file that then replaces the target."""
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    command = [*compiler, *map(str, sorted(sources)), "-o", str(draft)]
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
    if named := shlex.split(os.environ.get("CXX", "")):
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NoLibrary("no C++ compiler was found at installation (none of c++, g++, clang++)")


def find_nvcc() -> list[str]:
    if named := shlex.split(os.environ.get("CUDACXX") or os.environ.get("NVCC") or ""):
        return named
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home, "bin")))
    if not found:
        raise NoLibrary(f"no nvcc was found at installation (not on PATH, not in {home}/bin)")
    return [found]


class build_all(build):
    sub_commands = [*build.sub_commands, ("build_native", None)]  # noqa: RUF012


class wheel_for_any_python(bdist_wheel):
    """Tags the wheel for any Python 3: the libraries depend on the platform alone."""

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
