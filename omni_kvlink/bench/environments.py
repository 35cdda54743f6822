"""The Python environments of the systems that `kvlink-bench peers` runs, made on demand."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench import peers
from omni_kvlink.bench.report import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping

INSTALL_TIMEOUT = 1800.0
_READY = "installed.txt"


def default_folder() -> Path:
    """The directory of all environments: `omni_kvlink/peers` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "omni_kvlink" / "peers"


@dataclasses.dataclass(frozen=True)
class System:
    """A file of `omni_kvlink/bench/peers`: a system that moves blocks between two processes."""

    name: str

    @property
    def path(self) -> Path:
        """The file that its interpreter runs."""
        return Path(peers.__path__[0]) / f"{self.name}.py"

    def fact(self, name: str) -> Any:
        """The value of one of its constants; empty if it has none."""
        return getattr(importlib.import_module(f"{peers.__name__}.{self.name}"), name, "")

    def python(self, folder: Path, given: Mapping[str, str]) -> str:
        """The interpreter that has what it requires; installs that if there is none yet.

        `given` are interpreters by the name of their system. BenchError if pip fails.
        """
        if self.name in given:
            return given[self.name]
        requires: tuple[tuple[str, ...], ...] = self.fact("REQUIRES")
        if not requires:
            return sys.executable
        environment = folder / self.name
        python, ready = str(environment / "bin" / "python"), environment / _READY
        requirements = "\n".join(" ".join(run) for run in requires)
        if ready.exists() and ready.read_text() == requirements:
            return python
        _run(sys.executable, "-m", "venv", "--clear", str(environment))
        for run in requires:
            _run(python, "-m", "pip", "install", "--disable-pip-version-check", *run)
        ready.write_text(requirements)
        return python


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"not installed: {error}") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise BenchError(f"not installed: {(errors or lines)[-1]}")
