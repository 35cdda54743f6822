"""Runs every suite of the Makefile and prints a table; fails if one failed or a test never ran.

    python3 .ci/suites.py [SUITE …]     without arguments, all: an hour and 6 GB of packages

`test-all`, a quarter of an hour more, runs only when it is named: nothing else runs the tests
marked `slow`. In a run of all suites, a test that is skipped in every one of them is an error,
unless its reason begins with "this processor has no ". Tests marked `gpu` are selected by none: CI
has no device.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[1]
HARDWARE = "this processor has no "
"""The beginning of a reason to skip that no package can remove."""
RESULTS = ROOT / "build" / "ci"
SLOW = "test-all"
SOURCES = ("lint", "mutants-check", "licences", "docs", "demo", "fuzz")
NATIVE = ("asan", "tsan")
WHEELS = ("wheel", "wheel-test", "pythons", "wheel-aarch64", "wheel-aarch64-test")
TESTS = ("test", SLOW, "asan-tensors", "test-ucx")
CONTAINERS = "test-containers"
"""It runs all tests of `CONTAINER_TESTS`: `test` beside it leaves them out."""
CONTAINER_TESTS = "tests/containers"
SYSTEMS = ("test-prometheus", CONTAINERS)
VLLM = ("test-vllm", "test-vllm-dynamo", "asan-vllm")
HOSTS = (
    "test-hf-5.24.0",
    "test-hf-4.57.6",
    "test-vllm-interface",
    "test-vllm-omni",
    "test-ray",
    "test-diffusers",
    "test-hf-4.50.3",
    "test-torchao",
    "test-lmcache",
    "test-sglang",
)
PYTEST = (*TESTS, *VLLM, *HOSTS, *SYSTEMS)
STAGES = (
    (WHEELS, SOURCES, NATIVE, ("native-aarch64",)),
    (TESTS,),
    (VLLM, *((host,) for host in HOSTS), SYSTEMS),
)
"""One after the other. Two groups of one run beside each other, in this order: those that take long
first. The suites of a group follow each other, because they share an environment or a folder.
`TESTS` use all cores.
"""
LANES = 2
SUITES = tuple(suite for stage in STAGES for group in stage for suite in group if suite != SLOW)
LIMIT = 2700
"""Seconds after which a suite is ended, as a failure; the longest took 1,793, beside others."""
GRACE, NO_END = 10, 124
"""Seconds that such a suite has to print its traces; its exit status."""
ENDING = 60
"""Lines of a failed suite's output that are printed again at the end."""
_printing = threading.Lock()
SYSTEM = {
    "aarch64": {"qemu-aarch64": "qemu-user", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu"},
    "prometheus": {"prometheus": "prometheus"},
    "containers": {"podman": "podman", "crun": "crun"},
}
"""Programs that suites need which have these words in their names, and Debian's packages."""


@dataclass
class Outcome:
    """What one suite did."""

    name: str
    seconds: float
    status: int
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def is_green(self) -> bool:
        """Whether the target succeeded, and tests ran if it has any."""
        has_run = self.name not in PYTEST or bool(self.passed)
        return self.status == 0 and not self.failed and has_run

    def row(self) -> str:
        """The suite's line of the table."""
        verdict = "ok" if self.is_green else f"FAILED ({self.status})"
        passed, skipped = str(len(self.passed)), str(len(self.skipped))
        if self.name not in PYTEST:
            passed = skipped = ""
        reasons = Counter(self.skipped.values()).most_common(3)
        why = "; ".join(f"{count} × {reason}" for reason, count in reasons)
        return f"{self.name:16} {verdict:12} {passed:>7} {skipped:>7} {self.seconds:>8.0f}  {why}"


def run(suite: str, options: str = "") -> Outcome:
    """Run one target of the Makefile, then print its output and read what pytest reported."""
    report, log = RESULTS / f"{suite}.xml", RESULTS / f"{suite}.txt"
    report.unlink(missing_ok=True)
    arguments = [f"ARGS=-q --junitxml={report} {options}"] if suite in PYTEST else []
    say(f"make {suite} …")
    began = time.monotonic()
    with log.open("wb") as file:
        make = ["make", suite, *arguments]
        status = finish(make, file)
    outcome = Outcome(suite, time.monotonic() - began, status)
    if report.exists():
        read(report, outcome)
    say(f"\n=== make {suite}: {outcome.seconds:.0f} s\n{log.read_text(errors='replace')}")
    return outcome


def finish(command: Sequence[str], output: BinaryIO) -> int:
    """Run `command` as a process group; return its exit status, or `NO_END` past `LIMIT`.

    At the limit each process gets SIGABRT: pytest's prints where its threads are.
    """
    with subprocess.Popen(
        command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
        until = time.monotonic() + GRACE
        # A group without processes is an error to send to.
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)
    return NO_END


def ending(suite: str) -> str:
    """The last lines that a suite printed, where the cause of its failure is."""
    lines = (RESULTS / f"{suite}.txt").read_text(errors="replace").splitlines()
    return "\n".join(lines[-ENDING:])


def say(text: str) -> None:
    """Print lines that belong together."""
    with _printing:
        print(text, flush=True)


def run_all(suites: Sequence[str]) -> list[Outcome]:
    """Run the suites stage by stage, `LANES` groups of a stage at a time."""
    outcomes = []
    options = {"test": f"--ignore={CONTAINER_TESTS}"} if CONTAINERS in suites else {}

    def run_group(group: Sequence[str]) -> list[Outcome]:
        return [run(suite, options.get(suite, "")) for suite in group]

    for stage in STAGES:
        groups = [[one for one in suites if one in group] for group in stage]
        if any(one in HOSTS for group in groups for one in group):
            # Their environments build on it, and two suites would make it at once.
            subprocess.run(["make", ".venv/.ready"], cwd=ROOT, check=False)
        with ThreadPoolExecutor(LANES) as pool:
            found = pool.map(run_group, groups)
            outcomes += [outcome for group in found for outcome in group]
    return outcomes


def read(report: Path, outcome: Outcome) -> None:
    """Sort the test cases of a JUnit report into passed, failed and skipped."""
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.add(name)
        elif skipped is not None:
            outcome.skipped[name] = skipped.get("message", "")
        else:
            outcome.passed.add(name)


def never_run(outcomes: list[Outcome]) -> dict[str, str]:
    """Tests that no suite ran, with the reason the last suite gave."""
    ran = {name for outcome in outcomes for name in outcome.passed | outcome.failed}
    # A module that is skipped as a whole appears by its own name.
    modules = {name.partition("::")[0] for name in ran}
    return {
        name: reason
        for outcome in outcomes
        for name, reason in outcome.skipped.items()
        if name not in ran and name.partition("::")[2] not in modules and HARDWARE not in reason
    }


def install_system_packages(suites: Sequence[str]) -> None:
    """Install what is missing, as root on Debian; elsewhere the suites that need it fail."""
    needed = [SYSTEM[word] for word in SYSTEM if any(word in suite for suite in suites)]
    programs = {program: package for one in needed for program, package in one.items()}
    missing = [package for program, package in programs.items() if not shutil.which(program)]
    if missing and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
        subprocess.run([*install, *missing], check=False, stdout=subprocess.DEVNULL)


def main() -> int:
    """Run the suites that are named, or all; print the table; return the exit status."""
    suites = sys.argv[1:] or list(SUITES)
    is_all = set(suites) == set(SUITES)
    install_system_packages(suites)
    RESULTS.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    outcomes = run_all(suites)
    missing = never_run(outcomes) if is_all else {}
    for outcome in outcomes:
        if not outcome.is_green:
            print(f"\n=== the end of make {outcome.name}\n{ending(outcome.name)}")
            print(*(f"failed: {test}" for test in sorted(outcome.failed)), sep="\n")
    print(f"\n{'suite':16} {'verdict':12} {'passed':>7} {'skipped':>7} {'seconds':>8}  skipped why")
    for outcome in outcomes:
        print(outcome.row())
    print(f"{'together':44} {time.monotonic() - began:>8.0f}")
    for name, reason in sorted(missing.items()):
        print(f"never ran: {name}: {reason}")
    return 1 if missing or not all(outcome.is_green for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
