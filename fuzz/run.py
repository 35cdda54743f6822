"""Gives decoders inputs that atheris derives from their corpus; any undocumented exception fails.

    python fuzz/run.py [NAME …] [--seconds S] [--jobs N] [--grow]

Each decoder has a process of its own, for S seconds; N run at a time, by default as many as there
are processors. An input that ends one is left in build/fuzz.
`--grow` adds to the corpus 16 inputs of at most 1 KiB that reached code which none had reached.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

if "--in-process" in sys.argv:
    import atheris

    instrumented = atheris.instrument_imports(include=["omni_kvlink"])
else:
    instrumented = contextlib.nullcontext()
with instrumented:
    from decoders import CORPUS, DECODERS, run

ARTIFACTS = Path(__file__).parents[1] / "build" / "fuzz"
MAX_NBYTES, MAX_FILES = 1024, 16


def fuzz(name: str, arguments: list[str]) -> None:
    """Run libFuzzer in this process, which it ends."""
    atheris.Setup([sys.argv[0], *arguments], lambda data: run(name, data))
    atheris.Fuzz()


def start(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run libFuzzer in a process of its own."""
    command = [sys.executable, __file__, name, "--in-process", "--", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def check(name: str, seconds: int, grow: bool) -> bool:
    """Fuzz one decoder; print a line; return whether it raised documented errors only."""
    folder = CORPUS / name
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        new, seeds = Path(scratch, "new"), Path(scratch, "seeds")
        for path in (new, seeds):
            path.mkdir()
        for number, seed in enumerate(DECODERS[name].seeds()):
            (seeds / str(number)).write_bytes(seed)
        known = [str(path) for path in (seeds, folder) if path.is_dir()]
        limits = ["-rss_limit_mb=4096", "-timeout=20", f"-artifact_prefix={ARTIFACTS}/{name}-"]
        done = start(name, f"-max_total_time={seconds}", *limits, str(new), *known)
        runs = [line for line in done.stderr.splitlines() if line.startswith("Done ")]
        line = f"{'FAIL' if done.returncode else 'ok':5}{name:16}{(runs or [''])[0]}\n"
        if done.returncode:
            line += f"{done.stdout[-4000:]}\n{done.stderr[-1000:]}\n"
        print(line, end="", flush=True)  # in one write: others print meanwhile
        if grow and not done.returncode:
            folder.mkdir(parents=True, exist_ok=True)
            small = (path for path in new.iterdir() if 0 < path.stat().st_size <= MAX_NBYTES)
            for path in sorted(small, key=lambda path: path.stat().st_size)[-MAX_FILES:]:
                shutil.copy(path, folder)
    return not done.returncode


def main() -> int:
    """Fuzz the decoders that are named, or all; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DECODERS))
    parser.add_argument("--seconds", type=int, default=15, help="for each decoder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="decoders at a time")
    parser.add_argument("--grow", action="store_true", help="add to the corpus")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    own, _, libfuzzer = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(own.split())
    if options.in_process:
        fuzz(options.names[0], libfuzzer.split())
    unknown = set(options.names) - set(DECODERS)
    if unknown:
        parser.error(f"no decoder {', '.join(unknown)}; there are {', '.join(DECODERS)}")
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as threads:
        one = partial(check, seconds=options.seconds, grow=options.grow)
        results = list(threads.map(one, options.names or DECODERS))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
