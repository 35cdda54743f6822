"""Installs the wheel in dist/ under every supported Python that is found, without its dependencies.

    python3 .ci/pythons.py

torch is not installed, since x86-64 wheels of it on PyPI bring gigabytes of CUDA, and
`import omni_kvlink` needs it. So this checks what does not: that pip accepts the wheel, that every
file compiles without a warning, and that the native library loads and computes a CRC-32C. The
tests run under the Python of `make test`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
CHECK = """
import ctypes, pathlib, sysconfig, warnings
warnings.simplefilter("error")
package = pathlib.Path(sysconfig.get_path("purelib"), "omni_kvlink")
files = sorted(package.rglob("*.py"))
for file in files:
    compile(file.read_bytes(), str(file), "exec")
library = ctypes.CDLL(str(package / "_native" / "_kvlink.so"))
library.kvl_features.restype = ctypes.c_char_p
library.kvl_crc32c.restype = ctypes.c_uint32
found = library.kvl_crc32c(0, b"123456789", ctypes.c_uint64(9))
assert found == 0xE3069283, hex(found)
assert len(files) > 100, files
print(f"{len(files)} files compile; native library: {library.kvl_features().decode()}")
"""


def main() -> int:
    """Print a line for each version; return 1 if one failed, or if none was found."""
    (wheel,) = (ROOT / "dist").glob(f"*_{os.uname().machine}.whl")
    failed, found = 0, 0
    for version in VERSIONS:
        if not (python := find(version)):
            print(f"{version:6} not found")
            continue
        done = check(python, wheel)
        print(f"{version:6} {done.stdout.strip() or done.stderr.strip()}")
        found, failed = found + 1, failed + bool(done.returncode)
    return 1 if failed or not found else 0


def find(version: str) -> str | None:
    """Return a Python of this version: on PATH, or installed by pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates = [
        shutil.which(f"python{version}"),
        *map(str, versions.glob(f"{version}.*/bin/python")),
    ]
    for candidate in filter(None, candidates):
        # A shim of pyenv is there for versions that are not selected, too, and fails.
        if not subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode:
            return candidate
    return None


def check(python: str, wheel: Path) -> subprocess.CompletedProcess[str]:
    """Install the wheel into an environment of its own, and run the check there."""
    with tempfile.TemporaryDirectory() as folder:
        own = str(Path(folder, "bin", "python"))
        for command in (
            [python, "-m", "venv", folder],
            [own, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)],
            [own, "-I", "-c", CHECK],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                break
        return done


if __name__ == "__main__":
    sys.exit(main())
