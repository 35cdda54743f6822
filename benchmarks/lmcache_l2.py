"""LMCache's own bench of second levels: this library's adapter beside LMCache's, for files.

    .venv-lmcache/bin/python benchmarks/lmcache_l2.py [--rounds 20] [--data-size-kb 2048]

The rounds are those of `lmcache bench l2`, by its own code, and those of both adapters alternate in
one process, so that both meet the same load of the machine. Each round has keys of its own, and the
loaded bytes of each are compared with those that were stored. The files are in an empty folder, and
in the page cache when they are read. Printed are the medians of the rates by operation, the median
of the ratios of each pair of rounds, and the ratio of the fastest rounds, which a busy machine has
held up least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import TYPE_CHECKING, Any

import torch
from lmcache.cli.commands.bench.l2_adapter_bench import data, runner
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

if TYPE_CHECKING:
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

SLOT = 64 << 10
"""Bytes at most that a payload has beside those of its chunk."""
OPERATIONS = {"Store": "MB/s", "Lookup": "keys/s", "Load": "MB/s"}


def specs(folder: str, budget: int) -> dict[str, dict[str, Any]]:
    """The adapters, as LMCache's `--l2-adapter` takes them; this library's maps `budget` bytes."""
    options = {"directory": folder, "prefault": budget}
    params = {"serve": "shm://bench", "revision": "main", "budget": budget, "options": options}
    plugin = {
        "type": "plugin",
        "module_path": "omni_kvlink.integrations.lmcache",
        "class_name": "KVLinkL2Adapter",
        "adapter_params": params,
    }
    return {"kvlink": plugin, "fs": {"type": "fs", "base_path": f"{folder}/files"}}


class Side:
    """One adapter, with memory of its own as `lmcache bench l2` allocates it.

    Attributes:
        rates: of each round, by operation: of MB/s, or of keys/s for look-ups.
    """

    def __init__(self, spec: dict[str, Any], num_keys: int, nbytes: int):
        self._num_keys, self._nbytes = num_keys, nbytes
        buffer = data.make_aligned_tensor(2 * num_keys * nbytes, 4096)
        self._stored = data.make_memory_objects(buffer, num_keys, nbytes, 0)
        self._loaded = data.make_memory_objects(buffer, num_keys, nbytes, num_keys * nbytes, 1)
        given = argparse.Namespace(l2_adapter=[json.dumps(spec)])
        [config] = parse_args_to_l2_adapters_config(given).adapters
        memory = data.create_l1_memory_desc(buffer, align_bytes=4096)
        self.adapter: L2AdapterInterface = create_l2_adapter(config, l1_memory_desc=memory)
        self.rates: dict[str, list[float]] = {name: [] for name in OPERATIONS}

    def run(self, operation: str, number: int) -> None:
        """Run a round; SystemExit if a key is missing, or its bytes are others."""
        bench = getattr(runner, f"bench_{operation.lower()}")
        keys = data.make_object_keys(self._num_keys, key_offset=number * self._num_keys)
        given: dict[str, Any] = {"in_flight": 1, "num_keys": self._num_keys, "rounds": 1}
        given |= {"keys_for_round": lambda _: [keys], "log": lambda text: None}
        if operation != "Lookup":
            objects = self._stored if operation == "Store" else self._loaded
            given |= {"data_size": self._nbytes, "objs_for_round": lambda _: [objects]}
        result = bench(self.adapter, **given)
        is_equal = operation != "Load" or data.verify_round_trip(
            keys, self._stored, self._loaded, lambda text: None
        )
        if result.success_counts != [self._num_keys] or not is_equal:
            raise SystemExit(f"{operation}: {result.success_counts} of {self._num_keys} keys")
        amount = self._num_keys * (1 if operation == "Lookup" else self._nbytes / 1e6)
        self.rates[operation].append(amount / result.round_durations[0])


def main() -> None:
    """Alternate, and print the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--num-keys", type=int, default=16)
    parser.add_argument("--data-size-kb", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(1)  # else those of the bench's own `zero_` spin beside each load
    nbytes = args.data_size_kb << 10
    budget = args.rounds * args.num_keys * (nbytes + SLOT)
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
        sides = {
            name: Side(spec, args.num_keys, nbytes) for name, spec in specs(folder, budget).items()
        }
        try:
            for operation in OPERATIONS:
                for number in range(args.rounds):
                    both = list(sides.values())
                    for side in both if number % 2 else both[::-1]:
                        side.run(operation, number)
        finally:
            for side in sides.values():
                side.adapter.close()
    print(f"{args.rounds} rounds of {args.num_keys} keys, all verified")
    for operation, unit in OPERATIONS.items():
        ours, files = (sides[name].rates[operation] for name in ("kvlink", "fs"))
        ratio = statistics.median(one / other for one, other in zip(ours, files, strict=True))
        medians = statistics.median(ours), statistics.median(files)
        text = f"{operation:8} kvlink {medians[0]:9.0f}  fs {medians[1]:9.0f} {unit}, {ratio:.2f} ×"
        fastest = f"{max(ours):.0f} and {max(files):.0f}, {max(ours) / max(files):.2f} ×"
        print(f"{text}; fastest {fastest}")


if __name__ == "__main__":
    main()
