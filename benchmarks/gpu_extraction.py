"""Copies a cache from a GPU into shared memory and back, alone and beside matrix multiplications.

    python benchmarks/gpu_extraction.py [--rounds 20] [--layers 28 36] [--json FILE] [--plots DIR]

Every round alternates all measurements, so that each is compared with the plain copy, or with the
forward pass, of its own run. Before, a copy and a plain one alternate with nothing between them, as
when one request follows another. Exit status: 0 done, 2 there is no device (it says why).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from chart import OTHER, OURS, BarRow, chart, times

from omni_kvlink import BlockTable, KVCacheTransferData, PagedTensor
from omni_kvlink._native import cuda
from omni_kvlink.bench import machine, report
from omni_kvlink.bench.stats import Summary
from omni_kvlink.cli import terminal
from omni_kvlink.copier import GatherHandle, PinnedCopier
from omni_kvlink.memory.mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.copier import StreamEvents
    from omni_kvlink.payload.views import TensorView

DEVICE = "cuda"
HEADS, DIM, BLOCK = 4, 128, 16
WIDTH, MATMULS = 3584, 8
"""The forward pass: so many square matrices a layer, of a 7-billion model's width."""
WARMUP, IN_TURN = 3, 5
"""Rounds before those that count, and how many times as many rounds are in turn: they are short."""
LOAD_MS, LOAD_FACTOR = 20.0, 6.0
"""The multiplications beside a copy take so long, and so many times the plain copy, at least."""
MEANING = {
    "plain out": "one copy of as many bytes, device to page-locked memory",
    "gather": "the cache into the arena, with its digests",
    "gather, no digests": "",
    "plain in": "one copy of as many bytes, page-locked memory to device",
    "scatter": "the arena into the cache, digests checked",
    "plain out, loaded": "the same three while another stream multiplies matrices",
    "gather, loaded": "",
    "scatter, loaded": "",
    "plain out, in turn": "these four again, with no other work between two of one direction",
    "gather, in turn": "",
    "plain in, in turn": "",
    "scatter, in turn": "",
    "pass": "the forward pass, on the device",
    "pass, streamed": "the same; a thread takes each layer out when it is computed",
    "streamed": "from its start until the last digest is there",
    "one after the other": "the pass, then gather",
}
Times = dict[str, float]
"""Milliseconds by measurement."""


class Device:
    """The device's clock, and the engine's stream, on which the forward pass runs."""

    def __init__(self) -> None:
        self.engine = torch.cuda.Stream()

    def milliseconds(self, action: Callable[[], object]) -> float:
        """From the call of an action until the device has done it; all else is done before."""
        torch.cuda.synchronize()
        return self.milliseconds_beside(action)

    def milliseconds_beside(self, action: Callable[[], object]) -> float:
        """The same, while other streams may go on."""
        start = time.perf_counter()
        action()
        torch.cuda.current_stream().synchronize()
        return 1e3 * (time.perf_counter() - start)

    def span(self, action: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Run an action on the engine's stream; return events before and behind its work."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.engine):
            start.record()
            action()
            end.record()
        return start, end

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class ForwardPass:
    """A dummy forward pass: `MATMULS` square matrices a layer."""

    def __init__(self, layers: int, tokens: int):
        self.layers = layers
        self.weight = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=DEVICE) / WIDTH**0.5
        self.hidden = torch.randn(tokens, WIDTH, dtype=torch.bfloat16, device=DEVICE)

    def run(self, after_layer: Callable[[int], object] = lambda layer: None) -> None:
        hidden = self.hidden
        for layer in range(self.layers):
            for _ in range(MATMULS):
                hidden = hidden @ self.weight
            after_layer(layer)

    def multiply(self, count: int) -> None:
        hidden = self.hidden
        for _ in range(count):
            hidden = hidden @ self.weight


class Cache:
    """A cache on the device, shared memory for it, and the measurements of both.

    Args:
        layers: number of layers; K and V of each are `[tokens, HEADS, DIM]` bfloat16.
        tokens: of the cache.
        paged: in random blocks of `BLOCK` tokens, an eighth of each pool being other blocks.
        device: its clock.
    """

    def __init__(self, layers: int, tokens: int, *, paged: bool, device: Device):
        self.views = _views(2 * layers, tokens, paged=paged)
        blocks = {"key_cache": self.views[::2], "value_cache": self.views[1::2]}
        about = {"kv_lens": [tokens], "ropes": [tokens], "num_layers": layers}
        data = KVCacheTransferData("bench", blocks, (), about)
        self.plan, self.bare = data.plan(), data.plan(digests=False)
        # Without digests the header is shorter, and every byte lies elsewhere.
        self.region, self.bare_region = (
            Mapping.shared("gpu-extraction", plan.nbytes).region for plan in (self.plan, self.bare)
        )
        self.nbytes = sum(view.nbytes for view in self.views)
        self.flat = torch.zeros(self.nbytes, dtype=torch.uint8, device=DEVICE)
        self.pinned = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
        self.copier, self.device = PinnedCopier(), device
        self.forward = ForwardPass(layers, tokens)
        self.manifest = self.plan.with_digests(self.gather())
        self.saver, self.waiter = (ThreadPoolExecutor(1) for _ in range(2))
        self.load = 0  # multiplications beside a copy; `choose_load`
        self.outlasted = 0  # copies that took longer than these

    def measurements(self) -> list[Callable[[], Times]]:
        """The measurements of a round; each synchronizes the device first."""
        alone = {
            "plain out": self.plain_out,
            "gather": self.gather,
            "gather, no digests": lambda: self.copier.gather(
                self.views, self.bare, self.bare_region
            ),
            "plain in": self.plain_in,
            "scatter": self.scatter,
        }
        loaded = ("plain out", "gather", "scatter")
        return [
            *(partial(self._alone, name, action) for name, action in alone.items()),
            *(partial(self._loaded, f"{name}, loaded", alone[name]) for name in loaded),
            self._pass,
            self._streamed,
            self._one_after_the_other,
        ]

    def in_turn(self) -> list[list[Callable[[], Times]]]:
        """The measurements that alternate with nothing between them, out and in."""
        pairs = [
            {"plain out": self.plain_out, "gather": self.gather},
            {"plain in": self.plain_in, "scatter": self.scatter},
        ]
        return [
            [partial(self._alone, f"{name}, in turn", action) for name, action in pair.items()]
            for pair in pairs
        ]

    def plain_out(self) -> object:
        return self.pinned.copy_(self.flat, non_blocking=True)

    def plain_in(self) -> object:
        return self.flat.copy_(self.pinned, non_blocking=True)

    def gather(self) -> list[str]:
        return self.copier.gather(self.views, self.plan, self.region)

    def scatter(self) -> None:
        self.copier.scatter(self.manifest, self.region, self.views)

    def choose_load(self) -> None:
        """Choose how many multiplications run beside a copy, by the times of both."""
        self._pass()  # a warm-up
        one = self._pass()["pass"] / (MATMULS * self.forward.layers)
        plain = self.device.milliseconds(self.plain_out)
        self.load = multiplications(one, plain)

    def _alone(self, name: str, action: Callable[[], object]) -> Times:
        return {name: self.device.milliseconds(action)}

    def _loaded(self, name: str, action: Callable[[], object]) -> Times:
        self.device.synchronize()
        _, end = self.device.span(lambda: self.forward.multiply(self.load))
        took = self.device.milliseconds_beside(action)
        self.outlasted += end.query()
        return {name: took}

    def _pass(self) -> Times:
        self.device.synchronize()
        start, end = self.device.span(self.forward.run)
        end.synchronize()
        return {"pass": start.elapsed_time(end)}

    def _streamed(self) -> Times:
        """The engine's thread records an event a layer; another one begins the copies behind it."""
        waits: list[Future[Future[list[str]]]] = []

        def after_layer(layer: int) -> None:
            events = self.copier.record(self._layer(layer))
            waits.append(self.saver.submit(self._begin, layer, events))

        self.device.synchronize()
        began = time.perf_counter()
        start, end = self.device.span(lambda: self.forward.run(after_layer))
        for wait in waits:
            wait.result().result()
        end.synchronize()
        whole = 1e3 * (time.perf_counter() - began)
        return {"pass, streamed": start.elapsed_time(end), "streamed": whole}

    def _begin(self, layer: int, events: StreamEvents) -> Future[list[str]]:
        part = self.plan.part(range(2 * layer, 2 * layer + 2))
        begin = self.copier.begin_gather
        handle: GatherHandle = begin(self._layer(layer), part, self.region, after=events)
        return self.waiter.submit(handle.wait)

    def _one_after_the_other(self) -> Times:
        def both() -> None:
            self.device.span(self.forward.run)
            self.device.engine.synchronize()
            self.gather()

        return {"one after the other": self.device.milliseconds(both)}

    def _layer(self, layer: int) -> Sequence[TensorView]:
        return self.views[2 * layer : 2 * layer + 2]


def multiplications(one: float, plain: float) -> int:
    """How many multiplications of `one` millisecond run beside copies of `plain` milliseconds."""
    return math.ceil(max(LOAD_MS, LOAD_FACTOR * plain) / max(one, 1e-3))


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


def measure(cache: Cache, rounds: int) -> dict[str, Summary]:
    """Alternate all measurements; the first rounds are a warm-up."""
    found: dict[str, list[float]] = {name: [] for name in MEANING}
    cache.choose_load()
    phases = [
        *((each, IN_TURN * rounds) for each in cache.in_turn()),
        (cache.measurements(), rounds),
    ]
    for measurements, count in phases:
        for turn in range(WARMUP + count):
            if turn == WARMUP:
                cache.outlasted = 0
            for measured in measurements:
                for name, milliseconds in measured().items():
                    if turn >= WARMUP:
                        found[name].append(milliseconds)
    return {name: Summary.of(values) for name, values in found.items()}


def figures(found: dict[str, Summary]) -> dict[str, float]:
    """The figures that have a bar, and others beside them, from medians."""
    p50 = {name: summary.p50 for name, summary in found.items()}
    return {
        "rate_of_plain_out": p50["plain out"] / p50["gather"],
        "rate_of_plain_out_no_digests": p50["plain out"] / p50["gather, no digests"],
        "rate_of_plain_in": p50["plain in"] / p50["scatter"],
        "rate_of_plain_out_in_turn": p50["plain out, in turn"] / p50["gather, in turn"],
        "rate_of_plain_in_in_turn": p50["plain in, in turn"] / p50["scatter, in turn"],
        "rate_of_plain_out_loaded": p50["plain out, loaded"] / p50["gather, loaded"],
        "added_streamed_ms": p50["pass, streamed"] - p50["pass"],
        "streamed_after_pass_ms": p50["streamed"] - p50["pass"],
        "added_after_ms": p50["one after the other"] - p50["pass"],
    }


def text(title: str, nbytes: int, found: dict[str, Summary], outlasted: int) -> str:
    """The table of one shape, and its figures beside their bars."""
    read = figures(found)
    rows = [
        [name, *(f"{value:.3f}" for value in (s.p50, s.min, s.max)), _rate(name, nbytes, s), about]
        for (name, s), about in zip(found.items(), MEANING.values(), strict=True)
    ]
    lines = [
        f"{title}: {nbytes / 1e6:.0f} MB",
        terminal.table(["", "p50 ms", "min", "max", "GB/s", "what"], rows),
        f"out: {read['rate_of_plain_out']:.2f} of a plain copy's rate (bar: 0.90), "
        f"{read['rate_of_plain_out_loaded']:.2f} beside multiplications; "
        f"in: {read['rate_of_plain_in']:.2f}",
        f"in turn with a plain copy: out {read['rate_of_plain_out_in_turn']:.2f} (bar: 0.95), "
        f"in {read['rate_of_plain_in_in_turn']:.2f}",
        f"added to the forward pass: {read['added_streamed_ms']:.3f} ms streamed (bar: 1); "
        f"all is out {read['streamed_after_pass_ms']:.3f} ms after it, "
        f"and {read['added_after_ms']:.3f} ms if it begins then",
    ]
    if outlasted:
        lines.append(f"{outlasted} copies took longer than the multiplications beside them")
    return "\n".join(lines)


def _rate(name: str, nbytes: int, summary: Summary) -> str:
    return f"{nbytes / summary.p50 / 1e6:.1f}" if _is_copy(name) else ""


def _is_copy(name: str) -> bool:
    return name.startswith(("plain", "gather", "scatter"))


def draw(directory: Path, results: dict[str, Any]) -> list[Path]:
    """Write a picture of each shape: the copies' rates, and the passes' times."""
    written = []
    for title, result in results.items():
        name = title.replace(" layers × ", "x").replace(" tokens, ", "-")
        ms, nbytes = result["ms"], result["nbytes"]
        copies = [each for each in MEANING if _is_copy(each)]
        rates = [_rate_row(each, nbytes, ms[each]) for each in copies]
        passes = [times(each, ms[each], _color(each)) for each in MEANING if each not in copies]
        for kind, unit, rows in (("copies", "GB/s", rates), ("passes", "ms", passes)):
            path = directory / f"{name}-{kind}.svg"
            path.write_text(chart(f"{title}: {kind}", unit, rows))
            written.append(path)
    return written


def _rate_row(name: str, nbytes: int, values: dict[str, float]) -> BarRow:
    p50, least, most = (nbytes / 1e6 / values[key] for key in ("p50", "max", "min"))
    return BarRow(name, p50, least, most, _color(name))


def _color(name: str) -> str:
    return OTHER if name.startswith("plain") or name == "pass" else OURS


def describe() -> dict[str, Any]:
    peer = Mapping.for_readers("gpu-extraction", 1 << 20).readers
    assert peer is not None
    return {
        **machine.describe(),
        "device": cuda.describe(0),
        "torch_cuda": torch.version.cuda,
        "crossovers_bytes": cuda.measured_crossovers(0),
        # As a consumer of another process has a payload; if it is refused, torch copies.
        "readonly_mapping": cuda.register(peer.region, 0) or "page-locked",
    }


def missing() -> str | None:
    """Why nothing can be measured here."""
    reason = cuda.missing() or cuda.no_device()
    if reason is None and not torch.cuda.is_available():
        reason = "torch has no CUDA, or sees no device"
    return reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, nargs="+", default=[28, 36])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    parser.add_argument("--plots", metavar="DIR", help="draw pictures there")
    args = parser.parse_args()
    reason = missing()
    if reason:
        print(f"nothing was measured: {reason}", file=sys.stderr)
        return 2
    about, results, device = describe(), dict[str, Any](), Device()
    print(f"{machine.one_line(about)}, {about['device']}\n")
    for layers in args.layers:
        for paged in (False, True):
            cache = Cache(layers, args.tokens, paged=paged, device=device)
            found = measure(cache, args.rounds)
            title = f"{layers} layers × {args.tokens} tokens, {'paged' if paged else 'dense'}"
            print(text(title, cache.nbytes, found, cache.outlasted), end="\n\n", flush=True)
            results[title] = {
                "nbytes": cache.nbytes,
                "ms": {name: summary.to_dict() for name, summary in found.items()},
                **figures(found),
                "outlasted": cache.outlasted,
            }
    if args.json:
        shape = {"heads": HEADS, "head_dim": DIM, "block": BLOCK, "dtype": "bfloat16"}
        work = {"width": WIDTH, "multiplications_a_layer": MATMULS}
        setup = {"rounds": args.rounds, "tokens": args.tokens, **shape, **work}
        report.write_json(args.json, "gpu_extraction", about, setup, results)
    if args.plots:
        draw(Path(args.plots), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
