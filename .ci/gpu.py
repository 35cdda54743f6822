"""Builds the CUDA part, tests it on this machine's GPU, and measures it; prints a table.

    make gpu    or    python3 .ci/gpu.py [--rounds 20] [--results DIR] [STEP …]

A fresh clone, a GPU with its driver, the CUDA toolkit, a C++ compiler and Python 3.10 are enough.
`PYTHON=` names an interpreter whose packages are used where they suffice; what is missing is
installed into build/gpu/packages by pip. The figures go to benchmarks/results/<device>/.

Exit status: 0 every step is ok, 1 one is not, 2 there is no device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu"
PACKAGES = WORK / "packages"
NEEDED = {
    "setuptools": "setuptools",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "zmq": "pyzmq",
    "typing_extensions": "typing-extensions",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
}
"""What the package and its tests import, and the distributions that have it."""
FIND = """
import importlib.util as find
import sys
missing = [name for name in sys.argv[1:] if not find.find_spec(name)]
try:
    import torch
    found = torch.cuda.is_available()
except ImportError:
    found = False
print(*missing, *([] if found else ["torch"]))
"""
PYTEST = [
    *("-m", "pytest", "-m", "gpu", "-q", "-rs"),
    # torch on a device warns of other packages; RuntimeWarning, which is ours, stays an error.
    *("-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning"),
    *("-W", "ignore::UserWarning"),
]
# The last one needs vllm, and is skipped without; the second needs ucxx.
TESTS = ("tests/gpu", "tests/connectors/ucx", "tests/integrations/vllm")
SANITIZED = "test_host_and_device_in_one_payload or test_pages"


class NotDone(Exception):
    """A step could not be done; the text says why."""


@dataclass
class Verdict:
    """How one step ended."""

    step: str
    is_ok: bool
    seconds: float
    text: str

    def row(self) -> str:
        """Its line of the table."""
        verdict = "ok" if self.is_ok else "FAILED"
        return f"{self.step:10} {verdict:7} {self.seconds:>7.0f}  {self.text}"


def find_device() -> str:
    """The first device's name, from the driver; NotDone says why there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise NotDone("there is no NVIDIA driver (libcuda.so.1)") from None
    status, count, device = driver.cuInit(0), ctypes.c_int(), ctypes.c_int()
    if status or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise NotDone(f"the driver finds no device (cuInit: {status}); see CUDA_VISIBLE_DEVICES")
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, 128, device)
    return name.value.decode(errors="replace")


def slug(name: str) -> str:
    """The name of a device's folder of results."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def environment() -> dict[str, str]:
    """The environment of each step: this checkout, and the packages that were installed for it."""
    before = os.environ.get("PYTHONPATH", "")
    paths = [str(ROOT), str(PACKAGES), *filter(None, [before])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def run(log: str, command: Sequence[str], **more: str) -> str:
    """Run a command, show its output and keep it in build/gpu; NotDone if it fails."""
    path = WORK / f"{log}.log"
    print("$", *command, flush=True)
    lines = list[str]()
    with (
        path.open("w") as kept,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.write(line)
            lines.append(line)
    if process.returncode:
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise NotDone(f"status {process.returncode}: {last} (all of it: {path.relative_to(ROOT)})")
    return "".join(lines)


def install() -> str:
    """Install what this interpreter lacks."""
    found = subprocess.run(
        [sys.executable, "-c", FIND, *NEEDED],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    missing = found.stdout.split()
    if not missing:
        return "nothing was missing"
    names = [NEEDED.get(name, name) for name in missing]
    pip = [sys.executable, "-m", "pip", "install", "--target", str(PACKAGES), "--upgrade"]
    run("install", [*pip, *names])
    return f"pip installed {', '.join(names)}"


def build() -> str:
    """Compile both libraries in place; without nvcc it fails."""
    setup = [sys.executable, "setup.py", "-q", "build_native", "--inplace"]
    run("build", setup, OMNI_KVLINK_CUDA="on")
    nvcc = shutil.which(os.environ.get("CUDACXX", "nvcc")) or "/usr/local/cuda/bin/nvcc"
    listing = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", listing)
    return f"CUDA toolkit {release[1]}" if release else "built"


def test() -> str:
    """Run the tests on the device; a run that has no test is a failure."""
    report = WORK / "tests.xml"
    report.unlink(missing_ok=True)
    try:
        run("test", [sys.executable, *PYTEST, *TESTS, f"--junitxml={report}"])
    except NotDone as why:
        raise NotDone(f"{summary(report)}: {why}") from None
    text = summary(report)
    if text.startswith("0 passed"):
        raise NotDone(f"no test ran: {text}")
    return text


def summary(report: Path) -> str:
    """Count the tests of a JUnit report."""
    if not report.exists():
        return "0 passed"
    suites = list(ET.parse(report).iter("testsuite"))
    total, failed, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites for key in keys)
        for keys in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped"


def measure(directory: Path, rounds: int) -> str:
    """Run the extraction's and the runner's benchmark; write documents and pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    document = directory / "gpu_extraction.json"
    script = [sys.executable, "benchmarks/gpu_extraction.py", "--rounds", str(rounds)]
    run("measure", [*script, "--json", str(document), "--plots", str(directory)])
    stages = directory / "runner.json"
    script = [sys.executable, "benchmarks/runner.py", "--rounds", str(rounds)]
    run("runner", [*script, "--json", str(stages)])
    return bars(*(json.loads(each.read_text())["results"] for each in (document, stages)))


def bars(results: Mapping[str, Mapping[str, Any]], stages: Mapping[str, Mapping[str, Any]]) -> str:
    """The worst figure of each bar; a missed bar is reported, and fails nothing."""
    paged = [result for title, result in results.items() if title.endswith("paged")]
    rate = min(result["rate_of_plain_out"] for result in paged)
    added = max(result["added_streamed_ms"] for result in results.values())
    step = max(result["added_after_ms"] for result in stages.values())
    return (
        f"paged {rate:.2f} of a plain copy (bar 0.90), pass + {added:.2f} ms (bar 1), "
        f"runner's step + {step:.2f} ms (bar 5)"
    )


def sanitize() -> str:
    """Run some of the tests under compute-sanitizer, once: it takes many times as long."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        raise NotDone("compute-sanitizer was not found; it comes with the CUDA toolkit")
    # torch probes for features by calls that fail, which are no errors.
    checked = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "3"]
    checked += ["--target-processes", "application-only", sys.executable]
    tests = ["tests/gpu/test_gpu_bytes.py", "-k", SANITIZED, "--timeout=0"]
    text = run("sanitize", [*checked, *PYTEST, *tests])
    if "ERROR SUMMARY: 0 errors" not in text:
        raise NotDone("compute-sanitizer printed no summary")
    return "0 errors"


def machine(directory: Path, name: str, verdicts: Sequence[Verdict]) -> None:
    """Write what ran, where, and how it ended."""
    query = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total,power.limit"
    nvidia = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
    document = directory / "gpu_extraction.json"
    found = {
        "device": name,
        "command": "make gpu",
        "commit": output(["git", "rev-parse", "HEAD"]).strip(),
        "nvidia_smi": output(nvidia).splitlines(),
        "machine": json.loads(document.read_text())["machine"] if document.exists() else None,
        "steps": {each.step: [each.is_ok, each.text] for each in verdicts},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "machine.json").write_text(json.dumps(found, indent=2) + "\n")


def output(command: Sequence[str]) -> str:
    """What a command prints; nothing if it cannot be run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout


def attempt(step: str, action: Callable[[], str]) -> Verdict:
    """Do one step."""
    print(f"\n=== {step}", flush=True)
    began = time.monotonic()
    try:
        text, is_ok = action(), True
    except (NotDone, subprocess.SubprocessError, OSError) as error:
        text, is_ok = str(error), False
    verdict = Verdict(step, is_ok, time.monotonic() - began, text)
    print(f"=== {verdict.row()}", flush=True)
    return verdict


def main() -> int:
    """Do the steps that are named, or all; print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    try:
        name = find_device()
    except NotDone as why:
        print(f"nothing was built, tested or measured: {why}", file=sys.stderr)
        return 2
    directory = args.results.resolve() / slug(name)
    actions: dict[str, Callable[[], str]] = {
        "install": install,
        "build": build,
        "test": test,
        "measure": partial(measure, directory, args.rounds),
        "sanitize": sanitize,
    }
    unknown = set(args.steps) - actions.keys()
    if unknown:
        parser.error(f"no step {', '.join(sorted(unknown))}; use {', '.join(actions)}")
    WORK.mkdir(parents=True, exist_ok=True)
    print(f"{name}; results in {directory}")
    verdicts = [attempt(step, actions[step]) for step in args.steps or actions]
    machine(directory, name, verdicts)
    print(f"\n{'step':10} {'verdict':7} {'seconds':>7}")
    for verdict in verdicts:
        print(verdict.row())
    return 0 if all(verdict.is_ok for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
