"""How much longer the AR stage's own runner takes for a step when it sends the request's KV.

    python benchmarks/runner.py [--rounds 20] [--layers 28 36] [--tokens N] [--width N]
                                [--block 16] [--json FILE]

`GPUARModelRunner` reads a prompt with BAGEL's network, random weights in bfloat16, 4 KV heads of
128, and sends its KV to shared memory, with digests. Each round runs the step three times: sending
nothing; sending each layer while the next ones are computed; sending all layers when the pass has
ended. `added_after_ms` is the median of what the second takes longer than the first. It runs on the
first CUDA device, with 4096 tokens; without one on the host, with fewer, which says nothing of one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from omni_kvlink._native import cuda
from omni_kvlink.bench import machine, report
from omni_kvlink.bench.stats import Summary
from omni_kvlink.cli import terminal
from omni_kvlink.engine import OmniARConfig, OmniDiffusionRequest, OmniDiffusionSamplingParams
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.kv.kv_stream import KVStream
from omni_kvlink.engine.outputs import ARSchedulerOutput
from omni_kvlink.engine.tokens.outputs import KVSent
from omni_kvlink.engine.worker import GPUARModelRunner
from omni_kvlink.models.bagel import make_tiny_checkpoint
from omni_kvlink.models.bagel.tiny import tiny_config

if TYPE_CHECKING:
    from collections.abc import Mapping


KV_HEADS, DIM, WARMUP = 4, 128, 3
ON_DEVICE, ON_HOST = (4096, 2048), (64, 512)
"""Tokens, and the network's width."""
TOKEN = 7
"""Of the tiny checkpoint's vocabulary; the prompt repeats it."""
MEANING = {
    "step": "the step, sending nothing",
    "streamed": "the same, sending each layer while the next ones are computed",
    "at the end": "the same, sending all layers when the pass has ended",
}


class UnsentKV(KVStream):
    """Sends nothing."""

    def write_layer(self, layer: int, branch: str = "") -> None:
        """Leave the layer where it is."""

    def finish(self, extra: Mapping[str, Any] | None = None) -> KVSent:
        """Return that nothing was sent."""
        return KVSent(0)


class KVAtEnd(KVStream):
    """Sends all layers with `finish`."""

    def write_layer(self, layer: int, branch: str = "") -> None:
        """Leave the layer where it is until then."""


KINDS: dict[str, type[KVStream]] = {"step": UnsentKV, "streamed": KVStream, "at the end": KVAtEnd}


class Stage:
    """A runner with a network of so many layers, and blocks for one prompt of so many tokens.

    With `paged` the prompt's blocks of `block` tokens lie in random order; else one block has all.
    """

    def __init__(
        self, root: Path, layers: int, tokens: int, *, block: int, paged: bool, device: torch.device
    ):
        self.tokens, self.device, self._number = tokens, device, 0
        size = block if paged else tokens
        count = -(-tokens // size)
        self._blocks = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
        name = f"runner-{layers}-{int(paged)}"
        kv = KVConfig(sinks=(f"shm://{name}",), sink_options={"directory": str(root)})
        config = OmniARConfig(
            str(root),
            kv=kv,
            dtype="bfloat16",
            num_blocks=count,
            block_size=size,
            max_num_batched_tokens=tokens,
        )
        self.runner = GPUARModelRunner(config, device)
        assert self.runner.kv_sink is not None
        self._sink = self.runner.kv_sink
        self.nbytes, self.kind = 0, ""

    def milliseconds(self, kind: str) -> float:
        """From the call of a step to its end on the device, which waits for nothing else before."""
        self._number, self.kind = self._number + 1, kind
        key, sink = f"{kind}-{self._number}", self._sink
        made = KINDS[kind]
        sink.open = lambda: made(sink.link, sink._parts, 1, sink._config)  # type: ignore[method-assign]
        params = OmniDiffusionSamplingParams(height=16, width=16, seed=0)
        request = OmniDiffusionRequest([TOKEN] * self.tokens, params, key, need_kv_transfer=True)
        step = ARSchedulerOutput([request], block_ids={key: {"gen": self._blocks, "cfg_img": []}})
        self._synchronize()
        began = time.perf_counter()
        output = self.runner.execute_model(step).results[key]
        self._synchronize()
        took = 1e3 * (time.perf_counter() - began)
        if output.error is not None:
            raise output.error
        assert output.kv_sent is not None
        self.nbytes = max(self.nbytes, output.kv_sent.nbytes)
        sink.fail(key, "it was measured")
        return took

    def close(self) -> None:
        self.runner.close()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(stage: Stage, rounds: int) -> dict[str, Any]:
    """Alternate the three; the first rounds are a warm-up."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(WARMUP + rounds):
        for kind in KINDS:
            took = stage.milliseconds(kind)
            if number >= WARMUP:
                found[kind].append(took)
    ms = {kind: Summary.of(values) for kind, values in found.items()}
    return {
        "nbytes": stage.nbytes,
        "ms": {kind: summary.to_dict() for kind, summary in ms.items()},
        "added_after_ms": _added(found, "streamed"),
        "added_at_end_ms": _added(found, "at the end"),
    }


def _added(found: dict[str, list[float]], kind: str) -> float:
    """The median of what a step of this kind takes longer than the bare one of its round."""
    pairs = zip(found[kind], found["step"], strict=True)
    return Summary.of([sending - bare for sending, bare in pairs]).p50


def text(title: str, result: dict[str, Any]) -> str:
    """The table of one shape, and what sending adds."""
    rows = [
        [kind, *(f"{values[key]:.3f}" for key in ("p50", "min", "max")), MEANING[kind]]
        for kind, values in result["ms"].items()
    ]
    return "\n".join(
        [
            f"{title}: {result['nbytes'] / 1e6:.0f} MB",
            terminal.table(["", "p50 ms", "min", "max", "what"], rows),
            f"added_after_ms: {result['added_after_ms']:.3f} streamed (bar: 5), "
            f"{result['added_at_end_ms']:.3f} if all is sent at the end",
        ]
    )


def no_device() -> str | None:
    """Why the host computes; None if a device does."""
    reason = cuda.missing() or cuda.no_device()
    if reason is None and not torch.cuda.is_available():
        reason = "torch has no CUDA, or sees no device"
    return reason


def write_checkpoint(root: Path, layers: int, width: int) -> Path:
    """Write random weights of so many layers, of which each token has 4 KV heads of 128."""
    config = tiny_config()
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // DIM, "num_key_value_heads": KV_HEADS}
    llm = msgspec.structs.replace(config.llm, **sizes, **heads)
    return make_tiny_checkpoint(root, config=msgspec.structs.replace(config, llm=llm))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reason = no_device()
    tokens, width = ON_DEVICE if reason is None else ON_HOST
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, nargs="+", default=[28, 36])
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--width", type=int, default=width, help="of the network, n × 512")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block of a paged cache")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    device, about = torch.device("cpu" if reason else "cuda:0"), machine.describe()
    about["device"] = f"no device: {reason}" if reason else cuda.describe(0)
    print(f"{machine.one_line(about)}, {about['device']}\n")
    results = dict[str, Any]()
    for layers in args.layers:
        with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
            root = write_checkpoint(Path(folder), layers, args.width)
            for paged in (False, True):
                title = f"{layers} layers × {args.tokens} tokens, {'paged' if paged else 'dense'}"
                stage = Stage(
                    root, layers, args.tokens, block=args.block, paged=paged, device=device
                )
                results[title] = measure(stage, args.rounds)
                stage.close()
                print(text(title, results[title]), end="\n\n", flush=True)
    if args.json:
        shape = {"kv_heads": KV_HEADS, "head_dim": DIM, "block": args.block, "dtype": "bfloat16"}
        setup = {"rounds": args.rounds, "tokens": args.tokens, "width": args.width, **shape}
        report.write_json(args.json, "runner", about, setup, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
