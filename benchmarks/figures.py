"""Measures what this project claims: every command, its document, and how far each bar is.

`python benchmarks/figures.py` runs all of them, an hour on two cores; names choose some, and
`--show` only reads the documents. They are written to `benchmarks/results/MACHINE`.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench.machine import describe
from omni_kvlink.cli import terminal
from omni_kvlink.cli.process import run_guarded, show

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).parent
COMMANDS = {
    "bagel": "kvlink-bench latency",
    "nodigests": "kvlink-bench latency --no-digests",
    "bagel36": "kvlink-bench latency --preset bagel36",
    "branches": "kvlink-bench latency --branches 3",
    "paged": "kvlink-bench latency --paged",
    "verify": "kvlink-bench latency --verify full",
    "sealed": "kvlink-bench latency --mode sealed --rounds 8",
    "inproc": "kvlink-bench latency --connector inproc",
    "bagel-torch": "kvlink-bench latency --copier torch",
    "paged-torch": "kvlink-bench latency --paged --copier torch",
    "small": "kvlink-bench latency --preset small --rounds 100",
    "tiny": "kvlink-bench latency --preset tiny --rounds 200 --idle 5",
    "tiny-busy": "kvlink-bench latency --preset tiny --rounds 200 --busy",
    "zmq-tcp": "kvlink-bench latency --connector zmq+tcp",
    "zmq-tcp-keys": "kvlink-bench latency --connector zmq+tcp --keys",
    "zmq-tcp-tiny": "kvlink-bench latency --connector zmq+tcp --preset tiny --rounds 200",
    "stream-bagel": "kvlink-bench stream",
    "stream-bagel36": "kvlink-bench stream --preset bagel36",
    "stream-paged": "kvlink-bench stream --paged",
    "growing": "kvlink-bench append-stream",
    "growing-10": "kvlink-bench append-stream --rate 10",
    "growing-steps": "kvlink-bench append-stream --reader steps",
    "many": "kvlink-bench many --rounds 8",
    "many-live": "kvlink-bench many --live 50000",
    "copy": "kvlink-bench copy",
    "peers": "kvlink-bench peers",
    "peers-paged": "kvlink-bench peers --paged",
    "peers-tiny": "kvlink-bench peers --preset tiny --rounds 100",
    "first-transfer": "benchmarks/first_transfer.py",
}
"""The command of each document."""


def machine_name() -> str:
    """Return the name of this machine's folder, as `amd-epyc-2core`."""
    facts = describe()
    model = re.sub(r"\W+", "-", str(facts["cpu_model"]).lower()).strip("-")
    return f"{model}-{facts['cores']}core"


def measure(name: str, path: Path, nixl: str = "") -> int:
    """Run the command of `name`, which writes its document to `path`; return its exit status."""
    program, *options = shlex.split(COMMANDS[name])
    if nixl and name == "first-transfer":
        options += ["--nixl", nixl]
    beginning = ["-m", "omni_kvlink.bench"] if program == "kvlink-bench" else [program]
    print(f"\n$ {COMMANDS[name]}", flush=True)
    argv = [sys.executable, *beginning, *options, "--json", str(path)]
    return subprocess.run(argv, cwd=HERE.parent, check=False).returncode


def bars(folder: Path, names: Iterable[str]) -> str:
    """Return a table of all bars in the documents, that which is missed by most at the top."""
    rows = list[tuple[float, list[str]]]()
    for name in names:
        path = folder / f"{name}.json"
        document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        for bar in document.get("results", {}).get("bars", ()):
            got, limit = bar["got"], bar["limit"]
            share = got / limit
            text = f"{name}: {bar['bar']}"
            rows.append((share, [f"{share:.2f}", f"{got:.4g}", f"{limit:g}", text]))
    ordered = [row for _, row in sorted(rows, reverse=True)]
    return terminal.table(("of limit", "is", "limit", "document and bar"), ordered)


def main() -> int:
    """Measure, and print how far each bar is; 1 if a command fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--nixl", default="", help="a Python that has NIXL, to compare with")
    parser.add_argument("--machine", default=machine_name(), help="default: %(default)s")
    args = parser.parse_args()
    unknown = set(args.names) - set(COMMANDS)
    if unknown:
        parser.error(f"no such document: {', '.join(sorted(unknown))}")
    names, folder = args.names or list(COMMANDS), HERE / "results" / args.machine
    folder.mkdir(parents=True, exist_ok=True)
    to_measure = () if args.show else names
    failed = [name for name in to_measure if measure(name, folder / f"{name}.json", args.nixl)]
    show(bars(folder, names))
    if failed:
        show(f"failed: {', '.join(failed)}", to_stderr=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(run_guarded("figures.py", main))
