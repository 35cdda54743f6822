"""LMCache's own bench of second levels: this library's adapter beside LMCache's, for files.

    .venv-lmcache/bin/python benchmarks/lmcache_l2.py [--runs 5] [--data-size-kb 2048]

Runs of both alternate, each a process of its own with an empty folder, that verifies every key: the
files adapter would not write again what lies there from an earlier run. Printed are the medians of
their rates by operation, and the median of the ratios of each pair of runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LMCACHE = Path(sys.executable).with_name("lmcache")


def specs(folder: str) -> dict[str, dict[str, Any]]:
    """The adapters, as LMCache's `--l2-adapter` takes them."""
    params = {"serve": "shm://bench", "revision": "main", "options": {"directory": folder}}
    plugin = {
        "type": "plugin",
        "module_path": "omni_kvlink.integrations.lmcache",
        "class_name": "KVLinkL2Adapter",
        "adapter_params": params,
    }
    return {"kvlink": plugin, "fs": {"type": "fs", "base_path": f"{folder}/files"}}


def bench(spec: dict[str, Any], arguments: list[str], path: Path) -> dict[str, float]:
    """Run the bench once; MB/s of each operation, or its operations a second. It verifies."""
    command = [str(LMCACHE), "bench", "l2", "--no-skip-verify", *arguments]
    command += ["--format", "json", "--output", str(path), "--l2-adapter", json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    if "keys data verified OK" not in done.stdout:
        raise SystemExit(done.stdout)
    sections = json.loads(path.read_text())["metrics"].values()
    return {
        one["operation"]: float(one["throughput_avg_mbps"] or one["ops_per_sec_avg"])
        for one in sections
        if "operation" in one
    }


def main() -> None:
    """Alternate, and print the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--num-keys", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--data-size-kb", type=int, default=2048)
    args = parser.parse_args()
    given = [f"--num-keys={args.num_keys}", f"--rounds={args.rounds}"]
    given += [f"--data-size-kb={args.data_size_kb}", "--lookup-max-hit-rate=1.0"]
    runs = list[dict[str, dict[str, float]]]()
    for number in range(args.runs):
        with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
            both = list(specs(folder).items())
            order = both if number % 2 == 0 else both[::-1]
            runs.append({name: bench(spec, given, Path(folder, "m.json")) for name, spec in order})
    for operation in ("Store", "Lookup", "Load"):
        unit = "keys/s" if operation == "Lookup" else "MB/s"
        ours, files = ([run[name][operation] for run in runs] for name in ("kvlink", "fs"))
        ratio = statistics.median(one / other for one, other in zip(ours, files, strict=True))
        medians = statistics.median(ours), statistics.median(files)
        print(f"{operation:8} kvlink {medians[0]:9.0f}  fs {medians[1]:9.0f} {unit}, {ratio:.2f} ×")


if __name__ == "__main__":
    main()
