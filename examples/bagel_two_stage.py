"""BAGEL in two processes: the AR stage reads the prompt, the DiT stage paints the image.

Between them crosses one KV bundle. At the end every byte of K and V, and every pixel, is compared
with a run in a single process; the exit status says whether all of it is equal.

    python examples/bagel_two_stage.py                      # tiny random weights, shared memory
    python examples/bagel_two_stage.py --checkpoint DIR     # published weights
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from omni_kvlink import KVCacheBundle, KVLink
from omni_kvlink.adapters import BagelAdapter, pack_generator, unpack_generator
from omni_kvlink.models.bagel import (
    BagelContext,
    BagelContexts,
    BagelPipeline,
    DenoiseParams,
    NaiveCache,
    make_tiny_checkpoint,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks for; `image` is a file to edit."""

    request_id: str
    prompt: str
    image: str = ""
    seed: int = 7
    steps: int = 24

    def inputs(self) -> list[Any]:
        return ([Image.open(self.image)] if self.image else []) + [self.prompt]

    def params(self) -> DenoiseParams:
        kind = DenoiseParams.for_edit() if self.image else DenoiseParams.for_text_to_image()
        return dataclasses.replace(kind, num_timesteps=self.steps)


# The two stages. Each is a process of its own.


def run_ar(args: argparse.Namespace, requests: list[Request]) -> None:
    """Read prompts, and hand their caches on."""
    pipeline = load(args, "ar")
    with KVLink.serve(args.connector) as link:
        receipts = []
        for request in requests:
            start = time.perf_counter()
            generator = torch.Generator().manual_seed(request.seed)
            bundle = prefill(pipeline, request, generator)
            prefilled = time.perf_counter()
            receipts.append(receipt := link.put(bundle))
            tell(
                "put",
                request=request.request_id,
                prefill_ms=1e3 * (prefilled - start),
                tokens={name: bundle[name].metadata.seq_len for name in bundle},
                ledger=dataclasses.asdict(receipt.ledger),
            )
        for receipt in receipts:
            receipt.wait(timeout=args.timeout)


def run_dit(args: argparse.Namespace, requests: list[Request]) -> None:
    """Receive caches, and paint; the cache is used where it lies, nothing is copied out."""
    pipeline = load(args, "dit")
    with KVLink.connect(args.connector, timeout=args.timeout) as link:
        for request in requests:
            received = link.get(request.request_id, timeout=args.timeout, verify="full")
            with received as bundle:
                start = time.perf_counter()
                contexts, generator, params = unpack(bundle)
                image = pipeline.render(
                    contexts,
                    params,
                    generator=generator,
                    on_step=lambda done, total: tell("step", done=done, total=total),
                )
                seconds = time.perf_counter() - start
                Image.fromarray(image.numpy()).save(image_path(args, request))
                bundle.save(bundle_path(args, request))  # kept for the verdict
            del contexts
            pipeline.forget()  # the last view is gone: the memory goes back
            tell(
                "painted",
                request=request.request_id,
                render_ms=1e3 * seconds,
                ledger=dataclasses.asdict(received.ledger),
            )


def prefill(pipeline: BagelPipeline, request: Request, generator: torch.Generator) -> KVCacheBundle:
    """The AR half, with all that the DiT half needs to paint the same image."""
    contexts = pipeline.prefill(request.inputs(), generator=generator)
    extra = {
        "params": {**dataclasses.asdict(request.params()), "cfg_interval": None},
        "cfg_interval": list(request.params().cfg_interval),
        "generator": pack_generator(generator),
    }
    return BagelAdapter().export_contexts(
        {name: getattr(contexts, name) for name in ("gen", "cfg_text", "cfg_img")},
        request_id=request.request_id,
        image_shape=contexts.image_shape,
        extra=extra,
    )


def unpack(bundle: KVCacheBundle) -> tuple[BagelContexts, torch.Generator, DenoiseParams]:
    """The bundle as the pipeline wants it, its tensors still in the link's memory."""
    loaded = BagelAdapter().load_contexts(bundle, NaiveCache)
    metadata = bundle["gen"].metadata
    contexts = BagelContexts(
        **{name: BagelContext(**context) for name, context in loaded.items()},
        image_shape=metadata.image_shape,
    )
    params = {**metadata.extra["params"], "cfg_interval": tuple(metadata.extra["cfg_interval"])}
    return contexts, unpack_generator(metadata.extra["generator"]), DenoiseParams(**params)


# The director: starts the stages, prints what they tell, and compares.


def main() -> int:
    args = parse_arguments()
    # Two stages share the cores; and the same number everywhere, for the same sums.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    if args.stage:
        requests = [Request(**json.loads(line)) for line in sys.stdin]
        {"ar": run_ar, "dit": run_dit}[args.stage](args, requests)
        return 0
    Path(args.out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        args.scratch = scratch
        args.checkpoint = args.checkpoint or str(make_tiny_checkpoint(Path(scratch) / "tiny"))
        return direct(args)


def direct(args: argparse.Namespace) -> int:
    print(f"BAGEL from {args.checkpoint}, {args.dtype}, two processes over {args.connector}\n")
    alone = SingleProcess(args)
    paint = Request("text-to-image", "a red fox in the snow, at dawn", steps=args.steps)
    edit = Request("image-edit", "make it night", image=alone.run(paint), steps=args.steps)
    alone.run(edit)
    requests = [paint, edit]
    failed = run_stages(args, requests)
    for stage, status in failed.items():
        print(f"the {stage} stage failed with status {status}; no verdict")
    if failed:
        return 1
    verdicts = [verdict(args, request, alone) for request in requests]
    return 0 if all(verdicts) else 1


class SingleProcess:
    """The same requests without a link: what everything is compared with."""

    def __init__(self, args: argparse.Namespace):
        self._args, self._pipeline = args, load(args, "all")
        self.bundles: dict[str, KVCacheBundle] = {}

    def run(self, request: Request) -> str:
        """Paint; returns the image's file."""
        generator = torch.Generator().manual_seed(request.seed)
        self.bundles[request.request_id] = prefill(self._pipeline, request, generator)
        generator = torch.Generator().manual_seed(request.seed)
        image = self._pipeline.generate(request.inputs(), request.params(), generator=generator)
        path = str(Path(self._args.scratch) / f"{request.request_id}.png")
        Image.fromarray(image.numpy()).save(path)
        return path


def verdict(args: argparse.Namespace, request: Request, alone: SingleProcess) -> bool:
    """Compare what crossed, and what was painted, bit for bit."""
    crossed = KVCacheBundle.load(bundle_path(args, request))
    difference = crossed.difference(alone.bundles[request.request_id])
    painted = Image.open(image_path(args, request))
    expected = Image.open(Path(args.scratch) / f"{request.request_id}.png")
    same_image = painted.size == expected.size and painted.tobytes() == expected.tobytes()
    print(f"{request.request_id}: {image_path(args, request)}")
    print(f"  K/V   {'bit-exact' if not difference else 'DIFFERENT: ' + difference}")
    print(f"  image {'bit-exact' if same_image else 'DIFFERENT'}")
    return same_image and not difference


def run_stages(args: argparse.Namespace, requests: list[Request]) -> dict[str, int]:
    """Both stages at once, their words in one stream; returns those that failed."""
    told, telling = os.pipe()
    stages = {stage: start_stage(args, stage, requests, telling) for stage in ("ar", "dit")}
    os.close(telling)
    for stage, other in (("ar", "dit"), ("dit", "ar")):
        threading.Thread(target=end_together, args=(stages[stage], stages[other])).start()
    with os.fdopen(told) as events:
        for line in events:
            show(json.loads(line))
    return {name: stage.returncode for name, stage in stages.items() if stage.wait() != 0}


def end_together(stage: subprocess.Popen[str], other: subprocess.Popen[str]) -> None:
    """If one stage fails, the other may say what it saw of that, and is ended."""
    if stage.wait() != 0:
        try:
            other.wait(timeout=5)
        except subprocess.TimeoutExpired:
            other.terminate()


def start_stage(
    args: argparse.Namespace, stage: str, requests: list[Request], output: int
) -> subprocess.Popen[str]:
    options = {
        "--connector": args.connector,
        "--checkpoint": args.checkpoint,
        "--dtype": args.dtype,
        "--out": args.out,
        "--scratch": args.scratch,
        "--timeout": str(args.timeout),
    }
    command = [sys.executable, __file__, "--stage", stage]
    command += [word for option in options.items() for word in option]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=True)
    assert process.stdin
    for request in requests:
        process.stdin.write(json.dumps(dataclasses.asdict(request)) + "\n")
    process.stdin.close()
    return process


def show(event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "step":
        if sys.stdout.isatty():
            bar = "█" * (30 * event["done"] // event["total"])
            print(f"\r  denoising {bar:<30} {event['done']}/{event['total']}", end="")
        return
    ledger = event["ledger"]
    phases = ", ".join(f"{name} {1e3 * s:.2f}" for name, s in ledger["seconds"].items())
    if kind == "put":
        tokens = ", ".join(f"{name} {count}" for name, count in event["tokens"].items())
        print(f"AR   {event['request']}: prefill {event['prefill_ms']:.1f} ms; tokens: {tokens}")
        print(
            f"     sent {ledger['nbytes']:,} bytes with {ledger['copies']} copy; "
            f"{ledger['reused_nbytes']:,} bytes not sent, being the same or a prefix; "
            f"digests {ledger['digests']}"
        )
    else:
        end = "\r" + " " * 60 + "\r" if sys.stdout.isatty() else ""
        print(f"{end}DiT  {event['request']}: received with {ledger['copies']} copies, ", end="")
        print(f"painted in {event['render_ms']:.0f} ms")
    print(f"     ms: {phases}\n")


def load(args: argparse.Namespace, stage: Any) -> BagelPipeline:
    return BagelPipeline.from_pretrained(args.checkpoint, dtype=DTYPES[args.dtype], stage=stage)


def tell(event: str, **facts: Any) -> None:
    # One write a line: both stages speak into the same pipe.
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def image_path(args: argparse.Namespace, request: Request) -> str:
    return str(Path(args.out) / f"{request.request_id}.png")


def bundle_path(args: argparse.Namespace, request: Request) -> str:
    return str(Path(args.out) / f"{request.request_id}.safetensors")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint", default="", help="a BAGEL checkpoint; tiny and random if none"
    )
    parser.add_argument("--connector", default="shm://bagel-demo", help="the link's URL")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--steps", default=24, type=int, help="denoising timesteps")
    parser.add_argument("--out", default="out", help="where the images and caches go")
    parser.add_argument("--timeout", default=60.0, type=float, help="seconds for each wait")
    parser.add_argument("--stage", default="", choices=["", "ar", "dit"], help=argparse.SUPPRESS)
    parser.add_argument("--scratch", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
