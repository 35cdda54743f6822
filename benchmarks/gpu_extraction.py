"""Copies a cache from a GPU into shared memory and back, and compares with a plain copy.

    python benchmarks/gpu_extraction.py [--rounds 20] [--layers 28 36] [--json FILE]

Every round alternates all measurements, so that each is compared with the plain copy of its own
run. Exit status: 0 done, 2 there is no device (it says why).
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from omni_kvlink import BlockTable, KVCacheTransferData, PagedTensor
from omni_kvlink._native import cuda
from omni_kvlink.bench import machine, report
from omni_kvlink.bench.stats import Summary
from omni_kvlink.copier import GatherHandle, PinnedCopier
from omni_kvlink.memory.region import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.payload.views import TensorView

DEVICE = "cuda"
HEADS, DIM, BLOCK = 4, 128, 16
WIDTH, MATMULS = 3584, 8
"""The dummy forward pass: so many square matrices a layer, of a 7-billion model's width."""
WARMUP = 3
MEANING = {
    "plain out": "one copy of as many bytes, device to page-locked memory",
    "gather": "the cache into the arena, with its digests",
    "gather, no digests": "",
    "forward": "the dummy forward pass alone",
    "forward, gather": "one after the other",
    "forward, streamed": "each layer begun when it is computed; all copied",
    "plain in": "one copy of as many bytes, page-locked memory to device",
    "scatter": "the arena into the cache, digests checked",
}


class Cache:
    """A cache on the device, shared memory for it, and the measurements of both.

    Args:
        layers: number of layers; K and V of each are `[tokens, HEADS, DIM]` bfloat16.
        tokens: of the cache.
        paged: in random blocks of `BLOCK` tokens, an eighth of each pool being other blocks.
    """

    def __init__(self, layers: int, tokens: int, *, paged: bool):
        self.views = _views(2 * layers, tokens, paged=paged)
        blocks = {"key_cache": self.views[::2], "value_cache": self.views[1::2]}
        about = {"kv_lens": [tokens], "ropes": [tokens], "num_layers": layers}
        data = KVCacheTransferData("bench", blocks, (), about)
        self.plan, self.bare = data.plan(), data.plan(digests=False)
        self.region = Mapping.shared("gpu-extraction", self.plan.nbytes).region
        self.nbytes = sum(view.nbytes for view in self.views)
        self.flat = torch.zeros(self.nbytes, dtype=torch.uint8, device=DEVICE)
        self.pinned = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
        self.weight = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=DEVICE) / WIDTH**0.5
        self.hidden = torch.randn(tokens, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        self.copier = PinnedCopier()
        digests = self.copier.gather(self.views, self.plan, self.region)
        self.manifest = self.plan.with_digests(digests)

    def measurements(self) -> dict[str, Callable[[], object]]:
        """The measurements by name; each returns when the bytes are copied."""
        return {
            "plain out": lambda: self.pinned.copy_(self.flat, non_blocking=True),
            "gather": lambda: self.copier.gather(self.views, self.plan, self.region),
            "gather, no digests": lambda: self.copier.gather(self.views, self.bare, self.region),
            "forward": self.forward,
            "forward, gather": self.forward_and_gather,
            "forward, streamed": self.forward_streamed,
            "plain in": lambda: self.flat.copy_(self.pinned, non_blocking=True),
            "scatter": lambda: self.copier.scatter(self.manifest, self.region, self.views),
        }

    def forward(self, after_layer: Callable[[int], object] = lambda layer: None) -> None:
        hidden = self.hidden
        for layer in range(len(self.views) // 2):
            for _ in range(MATMULS):
                hidden = hidden @ self.weight
            after_layer(layer)

    def forward_and_gather(self) -> None:
        self.forward()
        self.copier.gather(self.views, self.plan, self.region)

    def forward_streamed(self) -> None:
        handles: list[GatherHandle] = []

        def begin(layer: int) -> None:
            own = slice(2 * layer, 2 * layer + 2)
            part = msgspec.structs.replace(self.plan, tensors=self.plan.tensors[own])
            handles.append(self.copier.begin_gather(self.views[own], part, self.region))

        self.forward(begin)
        for handle in handles:
            handle.wait()


def _views(count: int, tokens: int, *, paged: bool) -> list[TensorView]:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)

    if not paged:
        return [noise(tokens, HEADS, DIM) for _ in range(count)]
    used = -(-tokens // BLOCK)
    blocks = used + max(1, used // 8)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))[:used]
    block_table = BlockTable.of_blocks(order, block_size=BLOCK, tokens=tokens)
    return [PagedTensor(noise(blocks, BLOCK, HEADS, DIM), block_table) for _ in range(count)]


def timed(action: Callable[[], object]) -> float:
    """Milliseconds until it is done, on the device too."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.current_stream().synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(cache: Cache, rounds: int) -> dict[str, Summary]:
    actions = cache.measurements()
    found: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(WARMUP + rounds):
        for name, action in actions.items():
            milliseconds = timed(action)
            if turn >= WARMUP:
                found[name].append(milliseconds)
    return {name: Summary.of(values) for name, values in found.items()}


def verdicts(found: dict[str, Summary]) -> dict[str, float]:
    """The figures that have a bar, and those of the opposite direction."""
    p50 = {name: summary.p50 for name, summary in found.items()}
    return {
        "rate_of_plain_out": p50["plain out"] / p50["gather"],
        "rate_of_plain_in": p50["plain in"] / p50["scatter"],
        "added_after_ms": p50["forward, gather"] - p50["forward"],
        "added_streamed_ms": p50["forward, streamed"] - p50["forward"],
    }


def text(title: str, nbytes: int, found: dict[str, Summary], read: dict[str, float]) -> str:
    rows = [
        [
            name,
            *(f"{value:.3f}" for value in (s.p50, s.min, s.max)),
            _rate(name, nbytes, s),
            meaning,
        ]
        for (name, s), meaning in zip(found.items(), MEANING.values(), strict=True)
    ]
    lines = [
        f"{title}: {nbytes / 1e6:.0f} MB",
        report.table(["", "p50 ms", "min", "max", "GB/s", "what"], rows),
        f"out: {read['rate_of_plain_out']:.2f} of a plain copy's rate (bar: 0.90); "
        f"in: {read['rate_of_plain_in']:.2f}",
        f"added to the forward pass: {read['added_streamed_ms']:.3f} ms streamed (bar: 1), "
        f"{read['added_after_ms']:.3f} ms after it",
    ]
    return "\n".join(lines)


def _rate(name: str, nbytes: int, summary: Summary) -> str:
    return "" if name.startswith("forward") else f"{nbytes / summary.p50 / 1e6:.1f}"


def describe() -> dict[str, Any]:
    return {
        **machine.describe(),
        "device": cuda.describe(0),
        "torch_cuda": torch.version.cuda,
        "crossovers_bytes": cuda.measured_crossovers(0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, nargs="+", default=[28, 36])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    reason = cuda.missing() or cuda.no_device()
    if reason is None and not torch.cuda.is_available():
        reason = "torch has no CUDA, or sees no device"
    if reason:
        print(f"nothing was measured: {reason}", file=sys.stderr)
        return 2
    about, results = describe(), {}
    print(f"{machine.one_line(about)}, {about['device']}\n")
    for layers in args.layers:
        for paged in (False, True):
            cache = Cache(layers, args.tokens, paged=paged)
            found = measure(cache, args.rounds)
            title = f"{layers} layers × {args.tokens} tokens, {'paged' if paged else 'dense'}"
            read = verdicts(found)
            print(text(title, cache.nbytes, found, read), end="\n\n")
            times = {name: summary.to_dict() for name, summary in found.items()}
            results[title] = {"nbytes": cache.nbytes, "ms": times, **read}
    if args.json:
        setup = {**vars(args), "heads": HEADS, "head_dim": DIM, "block": BLOCK, "dtype": "bfloat16"}
        report.write_json(args.json, "gpu_extraction", about, setup, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
