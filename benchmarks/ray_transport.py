"""Tensors from one Ray actor to another: Ray's object store, and our tensor transport.

    python benchmarks/ray_transport.py [--rounds 20] [--layers 28] [--tokens 4096] [--json FILE]

"passed": an actor's method returns the tensors, and a method of another actor has them as its
argument; from the first call until the driver has the answer of the second. "another reader": a
third actor has the same object then. Every round alternates all routes, in random order; of each
route round 0 is the first transfer, round 1 the second. The three readers of an object compare the
digests of all its bytes with the source's, once for each route. Exit status: 0 done, 1 bytes
differ, 2 no Ray here.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
import sys
import time
from typing import Any

import torch

import omni_kvlink.integrations.ray
from omni_kvlink.bench import machine, report
from omni_kvlink.bench.stats import Summary
from omni_kvlink.cli import terminal

ROW = 512
"""Elements of a token's row of K or V, bfloat16."""
ROUTES = {
    "object store": "make",
    "object store, numpy": "make_arrays",
    "kvlink": "make_for_kvlink",
    "kvlink, views": "make_for_views",
}


def digest(tensors: list[Any]) -> str:
    """A digest of all bytes, of tensors or arrays."""
    found = hashlib.blake2b()
    for tensor in tensors:
        array: Any = tensor.view(torch.uint8).numpy() if torch.is_tensor(tensor) else tensor
        found.update(array)
    return found.hexdigest()


def actor_classes() -> tuple[Any, Any]:
    """The classes of the source and of the readers, with the transports of this process."""
    import ray

    omni_kvlink.integrations.ray.register()
    omni_kvlink.integrations.ray.register("kvlink-views", views=True)

    class TensorSource:
        """Has tensors, and returns them by each route."""

        def __init__(self, layers: int, tokens: int):
            torch.manual_seed(1)
            rows = [torch.randn(tokens, ROW) for _ in range(2 * layers)]
            self._tensors = [tensor.to(torch.bfloat16) for tensor in rows]

        def digest(self) -> str:
            return digest(self._tensors)

        def make(self) -> list[torch.Tensor]:
            return self._tensors

        def make_arrays(self) -> list[Any]:
            return [tensor.view(torch.uint8).numpy() for tensor in self._tensors]

        @ray.method(tensor_transport="kvlink")  # type: ignore[untyped-decorator]
        def make_for_kvlink(self) -> list[torch.Tensor]:
            return self._tensors

        @ray.method(tensor_transport="kvlink-views")  # type: ignore[untyped-decorator]
        def make_for_views(self) -> list[torch.Tensor]:
            return self._tensors

    class TensorReader:
        """Has tensors as arguments."""

        def receive(self, tensors: list[Any]) -> int:
            return sum(int(tensor.reshape(-1)[-1] != 0) for tensor in tensors)

        def digest(self, tensors: list[Any]) -> str:
            return digest(tensors)

    options: dict[str, Any] = {"num_cpus": 0, "enable_tensor_transport": True}
    return ray.remote(**options)(TensorSource), ray.remote(**options)(TensorReader)


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each round, by case and route."""
    import ray

    source_class, reader_class = actor_classes()
    source = source_class.remote(args.layers, args.tokens)
    readers = [reader_class.remote() for _ in range(3)]
    truth = ray.get(source.digest.remote())
    times: dict[str, dict[str, list[float]]] = {
        case: {route: [] for route in ROUTES} for case in ("passed", "another reader")
    }
    for _ in range(args.rounds + 1):
        for route in random.sample(list(ROUTES), len(ROUTES)):
            began = time.perf_counter()
            reference = getattr(source, ROUTES[route]).remote()
            ray.get(readers[0].receive.remote(reference))
            passed = time.perf_counter()
            ray.get(readers[1].receive.remote(reference))
            ended = time.perf_counter()
            times["passed"][route].append(1e3 * (passed - began))
            times["another reader"][route].append(1e3 * (ended - passed))
            del reference
    for name in ROUTES.values():
        reference = getattr(source, name).remote()
        found = ray.get([each.digest.remote(reference) for each in readers])
        if found != [truth] * 3:
            raise report.BenchError(f"{name}: three readers have {found}, the source {truth}")
        del reference
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("nothing was measured: Ray is not installed", file=sys.stderr)
        return 2
    import ray

    about = machine.describe() | {"ray": ray.__version__}
    print(machine.one_line(about))
    nbytes = args.layers * 2 * args.tokens * ROW * 2
    memory = max(1 << 28, 6 * nbytes)
    how = {"address": "local", "num_cpus": 4, "include_dashboard": False, "log_to_driver": False}
    ray.init(object_store_memory=memory, **how)
    try:
        times = measure(args)
    except report.BenchError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        ray.shutdown()
    print(f"bytes: {nbytes}; ms: the first, the second, p50 [min..max] of the others")
    rows, values = [], dict[str, Any]()
    for case, by_way in times.items():
        for route, (first, *others) in by_way.items():
            summary = Summary.of(others)
            text = f"{summary.p50:.1f} [{summary.min:.1f}..{summary.max:.1f}]"
            rows.append([f"{case}, {route}", f"{first:.1f}", f"{others[0]:.1f}", text])
            values.setdefault(case, {})[route] = {
                "first": first,
                "second": others[0],
                **summary.to_dict(),
            }
    print(terminal.table(["", "first", "second", "p50"], rows))
    print("three readers have the bytes of the source, by each route")
    ratios = {
        case: {route: by["object store"]["p50"] / by[route]["p50"] for route in by}
        for case, by in values.items()
    }
    ratios |= {
        f"{case}, second": {
            route: by["object store"]["second"] / by[route]["second"] for route in by
        }
        for case, by in values.items()
    }
    for case, by in ratios.items():
        text = ", ".join(f"{route} {ratio:.1f} ×" for route, ratio in by.items())
        print(f"{case}: as fast as the object store: {text}")
    if args.json:
        setup = {"rounds": args.rounds, "layers": args.layers, "tokens": args.tokens}
        results = {"nbytes": nbytes, "ms": values, "speedup": ratios}
        report.write_json(args.json, "ray_transport", about, setup, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
