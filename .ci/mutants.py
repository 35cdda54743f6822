"""Runs named mutants of the package: for each, its tests must fail.

    python .ci/mutants.py [NAME | PATH] … [--jobs N] [--timeout S] [-W FILTER] [--check]

`.ci/mutants.toml` lists them: a text of a file that occurs once, what replaces it, and the tests
that must fail then. Without arguments, all are run; a path selects the mutants of the files below
it. Each runs in a private copy of the package and the tests, which is rebuilt for a mutant of csrc.
The tests must pass without a mutant first. A test fails by an assertion or an error of the package,
not because it cannot be imported; a mutant for which a test hangs or its process dies says so
(`outcome`). A survivor, a mutant whose text is not there and one whose tests are skipped here fail
the command.

Those of a host's integration are run by the Python of its environment, with the filters of warnings
that the Makefile gives to its tests: `.venv-lmcache/bin/python .ci/mutants.py -W
ignore::DeprecationWarning omni_kvlink/integrations/lmcache`.

`--check` runs nothing: it verifies that each text occurs once, that the mutant compiles, and that
its tests exist.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / ".ci" / "mutants.toml"
COPIED = (
    *("omni_kvlink", "csrc", "tests", "benchmarks", "examples", "fuzz"),
    *("setup.py", "pyproject.toml"),
)
OUTCOMES = ("failure", "hang", "crash")
BROKEN = re.compile(r"^(\w+\.)*(ImportError|ModuleNotFoundError|NameError|SyntaxError)\b")
"""Messages of failures that show that the mutant does not run: no test caught it."""
HANG = re.compile(r"^(\w+\.)*(Failed: )?Timeout ")
_START = 1_000_000_000
"""Modification times of mutated files count from here: Python caches a file by its seconds."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file, and the tests that must fail after it.

    Args:
        name: unique; says what is dropped or wrong.
        file: relative to the root.
        old: text that occurs in the file exactly once.
        new: what replaces it.
        tests: pytest nodes.
        outcome: how the tests end besides a failure: "hang" if they wait in vain, "crash" if their
            process dies.
        needs: a module, or a processor as `platform.machine` names it, without which it is left
            out.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    outcome: str = "failure"
    needs: str = ""

    @property
    def is_native(self) -> bool:
        """Whether the library must be built again."""
        return self.file.startswith("csrc/")

    def missing(self) -> bool:
        """Whether this machine lacks what it needs."""
        is_here = not self.needs or self.needs == platform.machine()
        return not is_here and importlib.util.find_spec(self.needs) is None

    def applied(self, root: Path) -> str:
        """The mutated text of the file; ValueError if it is not applicable."""
        path = root / self.file
        count = path.read_text().count(self.old) if path.exists() else 0
        if count != 1 or self.old == self.new:
            raise ValueError(f"its text occurs {count} times in {self.file}, and must once")
        return path.read_text().replace(self.old, self.new)


def read_list(path: Path) -> list[Mutant]:
    """The mutants of a list, in its order; ValueError if two have the same name."""
    rows = tomllib.loads(path.read_text())["mutant"]
    mutants = [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    for name, times in Counter(mutant.name for mutant in mutants).items():
        if times > 1:
            raise ValueError(f"{path}: {times} mutants are called {name!r}")
    return mutants


# ---- the quick check


def problems(mutant: Mutant, root: Path, scratch: Path) -> Iterator[str]:
    """What is wrong with a mutant, found without running a test."""
    if mutant.outcome not in OUTCOMES:
        yield f"outcome {mutant.outcome!r}; one of {', '.join(OUTCOMES)}"
    if not mutant.tests:
        yield "it names no tests"
    for node in mutant.tests:
        file, _, name = node.partition("::")
        source = (root / file).read_text() if (root / file).is_file() else ""
        if not source or (name and f"def {name.partition('[')[0]}(" not in source):
            yield f"there is no test {node}"
    try:
        text = mutant.applied(root)
        if mutant.file.endswith(".py"):
            compile(text, mutant.file, "exec")
    except (SyntaxError, ValueError) as error:
        yield str(error)
        return
    if mutant.is_native:
        yield from native_problems(mutant, text, root, scratch)


def native_problems(mutant: Mutant, text: str, root: Path, scratch: Path) -> Iterator[str]:
    """The compiler's first error; nothing without a compiler."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return
    header = mutant.file.endswith(".h")
    draft = scratch / f"{mutant.name}{'.h' if header else '.cpp'}".replace("/", "-")
    draft.write_text(text)
    folders = (Path(mutant.file).parent, "csrc", "csrc/tests/fake_cuda")
    options = ["-std=c++17", "-fsyntax-only", "-x", "c++", *(f"-I{root / one}" for one in folders)]
    done = subprocess.run([compiler, *options, str(draft)], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if " error: " in line]
        yield (errors or ["it does not compile"])[0]


def absent_tests(mutants: Sequence[Mutant], root: Path) -> Iterator[str]:
    """Tests with parameters that pytest does not find; those of a file that it skips may be there.

    The text of a file shows a function, and not its parameters.
    """
    named = {node: one.name for one in mutants for node in one.tests if "[" in node}
    files = sorted({node.partition("::")[0] for node in named})
    if not files:
        return
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *files]
    done = subprocess.run(collect, cwd=root, capture_output=True, text=True)
    found = {line for line in done.stdout.splitlines() if "::" in line}
    collected = {node.partition("::")[0] for node in found}
    for node, name in named.items():
        if node not in found and node.partition("::")[0] in collected:
            yield f"{name}: there is no test {node}"


def check(mutants: Sequence[Mutant], root: Path) -> int:
    """Print what is wrong; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor() as pool:
        found = pool.map(lambda one: [*problems(one, root, Path(scratch))], mutants)
        pairs = zip(mutants, found, strict=True)
        bad = [f"{one.name}: {text}" for one, texts in pairs for text in texts]
    bad += absent_tests(mutants, root)
    for line in bad:
        print(line)
    print(f"{len(mutants)} mutants, {len(bad)} problems")
    return 1 if bad else 0


# ---- running them


@dataclasses.dataclass
class Run:
    """What pytest did: its exit status, and its test cases by what became of them."""

    status: int
    passed: list[str] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    failures: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def passed_of(self, node: str) -> bool:
        """Whether a test of this node passed."""
        file, _, name = node.partition("::")
        module = file.removesuffix(".py").replace("/", ".")
        return any(
            case.startswith((f"{module}::{name}", f"{module}.{name}")) for case in self.passed
        )

    def verdict(self, mutant: Mutant) -> tuple[bool, str]:
        """Whether the mutant was caught, and how."""
        broken = [text for _, text in self.failures if BROKEN.match(text)]
        hung = [name for name, text in self.failures if HANG.match(text)]
        if self.status == -signal.SIGKILL:
            return mutant.outcome == "hang", "hung: the process"
        if self.status < 0:
            return mutant.outcome == "crash", f"the process died of signal {-self.status}"
        if self.status == 0:
            return False, "SURVIVED" if self.passed else "its tests were skipped"
        if self.status != 1 or broken or not self.failures:
            return False, f"it does not run: {(broken or [f'pytest status {self.status}'])[0]:.80}"
        if hung:
            return mutant.outcome == "hang", f"hung: {hung[0]}"
        return True, self.failures[0][0]


FORKER = """
import importlib, os, sys
import pytest
for name in ("torch", "numpy", "msgspec", "zmq", "psutil", "safetensors"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.setsid()
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        status = int(pytest.main(line.rstrip("\\n").split("\\t")))
        sys.stdout.flush()
        os._exit(status)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Runs pytest in forks of a process that has imported all but the package: torch takes seconds."""


class Forker:
    """A process that forks one for each run of pytest, in a directory."""

    def __init__(self, directory: Path):
        environment = {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKER],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: Sequence[str], timeout: float) -> int:
        """Run pytest; return its exit status, negative for a signal, and kill what it leaves."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\t".join(arguments) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        timer = threading.Timer(timeout, _kill_group, (pid,))
        timer.start()
        try:
            return int(self._process.stdout.readline())
        finally:
            timer.cancel()
            _kill_group(pid)

    def close(self) -> None:
        """End the process; blocks until it has."""
        self._process.communicate()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class Copy:
    """A private copy of the package and the tests, in which one mutant at a time is run."""

    def __init__(self, root: Path, scratch: Path, filters: Sequence[str] = ()):
        self.root, self._filters = scratch, filters
        self._writes = 0
        ignored = shutil.ignore_patterns("__pycache__", "results", ".hypothesis")
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, scratch / name, ignore=ignored)
            elif (root / name).exists():
                shutil.copy(root / name, scratch / name)
        self._forker = Forker(scratch)

    def run(self, mutant: Mutant, timeout: float) -> Run:
        """Apply a mutant, run its tests, and undo it."""
        path, libraries = self.root / mutant.file, dict[Path, bytes]()
        before, text = path.read_text(), mutant.applied(self.root)
        native = self.root / "omni_kvlink" / "_native"
        try:
            self._write(path, text)
            if mutant.is_native:
                libraries = {file: file.read_bytes() for file in native.glob("*.so")}
                self._build()
            return self.pytest(mutant.tests, timeout)
        finally:
            self._write(path, before)
            for file, content in libraries.items():
                file.unlink(missing_ok=True)  # not in place: a process may have mapped it
                file.write_bytes(content)

    def pytest(self, nodes: Sequence[str], timeout: float, *, all_of_them: bool = False) -> Run:
        """Run tests; each may take `timeout` seconds. Kills what they leave."""
        report = self.root / "report.xml"
        report.unlink(missing_ok=True)
        arguments = ["-q", "-p", "no:cacheprovider", f"--timeout={timeout:g}", "--tb=line"]
        arguments += [part for one in self._filters for part in ("-W", one)]
        arguments += [f"--junitxml={report}", *([] if all_of_them else ["-x"]), *nodes]
        limit = 2 * timeout * (len(nodes) if all_of_them else 1)
        run = Run(self._forker.run(arguments, limit))
        if report.exists():
            _read(report, run)
        elif run.status > 0:
            print((self.root / "output.txt").read_text()[-4000:])
        return run

    def close(self) -> None:
        """End the process that forks."""
        self._forker.close()

    def _build(self) -> None:
        command = [sys.executable, "setup.py", "-q", "build_native", "--inplace"]
        environment = {**os.environ, "PYTHONPATH": str(self.root), "OMNI_KVLINK_CUDA": "off"}
        subprocess.run(command, cwd=self.root, env=environment, check=True, capture_output=True)
        if not (self.root / "omni_kvlink" / "_native" / "_kvlink.so").exists():
            raise ValueError("the library does not compile")

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        self._writes += 1
        os.utime(path, (_START + self._writes, _START + self._writes))


def _read(report: Path, run: Run) -> None:
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        wrong = [*case.findall("failure"), *case.findall("error")]
        run.failures += [(name, one.get("message", "")) for one in wrong]
        if case.find("skipped") is not None:
            run.skipped.append(name)
        elif not wrong:
            run.passed.append(name)


class Campaign:
    """Runs mutants, some at once; each copy is used by one thread at a time."""

    def __init__(
        self, root: Path, scratch: Path, timeout: float, jobs: int, filters: Sequence[str] = ()
    ):
        self._timeout, self._jobs = timeout, jobs
        self._copies: SimpleQueue[Copy] = SimpleQueue()
        self._all: list[Copy] = []
        for number in range(jobs):
            (scratch / str(number)).mkdir()
            self._all.append(Copy(root, scratch / str(number), filters))
            self._copies.put(self._all[-1])
        self._printing = threading.Lock()

    def baseline(self, mutants: Sequence[Mutant]) -> bool:
        """Whether the unmutated code passes the tests of all mutants."""
        nodes = list(dict.fromkeys(node for mutant in mutants for node in mutant.tests))
        # A node below a file that is run anyway would be run twice.
        nodes = [n for n in nodes if "::" not in n or n.partition("::")[0] not in nodes]
        copy = self._copies.get()
        run = copy.pytest(nodes, self._timeout, all_of_them=True)
        self._copies.put(copy)
        for name, text in run.failures:
            print(f"without a mutant: {name}: {text:.200}")
        lacking = [one for one in mutants if not any(map(run.passed_of, one.tests))]
        for mutant in lacking:
            print(f"{mutant.name}: none of its tests runs here: {', '.join(mutant.tests)}")
        print(f"{len(run.passed)} tests pass without a mutant, {len(run.skipped)} are skipped")
        return not run.status and not lacking

    def run(self, mutants: Sequence[Mutant]) -> int:
        """Run all; return how many were caught."""
        with ThreadPoolExecutor(self._jobs) as pool:
            return sum(pool.map(self._run_one, mutants))

    def close(self) -> None:
        """End the processes of all copies."""
        for copy in self._all:
            copy.close()

    def _run_one(self, mutant: Mutant) -> bool:
        copy, began = self._copies.get(), time.monotonic()
        try:
            is_caught, how = copy.run(mutant, self._timeout).verdict(mutant)
        except (ValueError, subprocess.CalledProcessError) as error:
            is_caught, how = False, f"not applicable: {error}"
        finally:
            self._copies.put(copy)
        with self._printing:
            verdict, seconds = "caught" if is_caught else "MISSED", time.monotonic() - began
            print(f"{verdict} {seconds:5.0f} s  {mutant.name:56} {how}", flush=True)
        return is_caught


def selected(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """The mutants with these names, or of files below these paths; SystemExit if one has none."""
    found = []
    for name in names:
        some = [one for one in mutants if one.name == name or one.file.startswith(name)]
        if not some:
            raise SystemExit(f"there is no mutant {name!r}, nor one of files below it")
        found += some
    return list(dict.fromkeys(found)) if names else list(mutants)


def main() -> int:
    """Check or run the mutants; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="mutants, or paths of files")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one test")
    parser.add_argument(
        "-W", action="append", default=[], dest="filters", help="a filter of warnings for pytest"
    )
    parser.add_argument("--check", action="store_true", help="run nothing, check the list")
    parser.add_argument("--list", type=Path, default=LIST, help="the list (default: %(default)s)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project (default: this one)")
    options = parser.parse_args()
    mutants = selected(read_list(options.list), options.names)
    if options.check:
        return check(mutants, options.root)
    left_out = [mutant for mutant in mutants if mutant.missing()]
    for mutant in left_out:
        print(f"left out: {mutant.name} needs {mutant.needs}")
    mutants = [mutant for mutant in mutants if mutant not in left_out]
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        jobs, filters = max(1, options.jobs), options.filters
        campaign = Campaign(options.root, Path(scratch), options.timeout, jobs, filters)
        try:
            caught = campaign.run(mutants) if campaign.baseline(mutants) else 0
        finally:
            campaign.close()
    print(f"{caught} of {len(mutants)} caught, {len(left_out)} left out")
    return 0 if caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
