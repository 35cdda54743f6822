"""`kvlink doctor` in a process of its own: its exit status and its report."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.doctor.report import Finding, HealthReport
from support.processes.fork_server import new_interpreters

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Visit(NamedTuple):
    """The exit status of one run, and its report."""

    status: int
    report: HealthReport

    def wrong(self) -> list[Finding]:
        """The findings that are wrong."""
        return wrong_findings(self.report)


def wrong_findings(report: HealthReport) -> list[Finding]:
    """The findings of a report that are wrong."""
    return [finding for finding in report.findings if finding.status == "wrong"]


def visit(
    *argv: str,
    prefix: tuple[str, ...] = (),
    preexec: Callable[[], object] | None = None,
    folder: str | Path | None = None,
    **environment: str,
) -> Visit:
    """Run the command with `--json`, in a changed environment, behind a `prefix` (unshare)."""
    with new_interpreters():
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "omni_kvlink.cli", "doctor", "--json", *argv],
            env={**os.environ, **environment},
            preexec_fn=preexec,
            cwd=folder,  # Python finds a package there first
            capture_output=True,
            text=True,
        )
    assert done.stdout, done.stderr
    return Visit(done.returncode, HealthReport.read(done.stdout))
