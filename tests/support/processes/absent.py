"""Runs code without a package, in a process that has not imported omni_kvlink yet."""

from __future__ import annotations

import subprocess
import sys

from support.processes.fork_server import new_interpreters, without_package

IMPORTED = """
import sys
import {modules}
assert not [name for name in sys.modules if name.split(".")[0] in {packages}]
"""
MISSING = """
import sys
sys.modules[{package!r}] = None  # as if it were not installed
from omni_kvlink import UnavailableError
try:
{use}
except UnavailableError as error:
    print(error)
"""


def run(code: str, *, preloaded: bool = True) -> str:
    """Run code in a new process and return its output; `fork_server.PRELOADED` is preloaded."""
    with without_package() if preloaded else new_interpreters():
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_untouched(modules: str, *packages: str) -> None:
    """Check that importing these modules imports none of these packages."""
    run(IMPORTED.format(modules=modules, packages=packages))


def cure(package: str, use: str) -> str:
    """Return the error of using a package that is not installed."""
    lines = "\n".join(f"    {line}" for line in use.strip().splitlines())
    return run(MISSING.format(package=package, use=lines))
