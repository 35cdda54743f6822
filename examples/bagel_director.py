"""What the BAGEL example asks of its two stages, how they are started, and what became of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from PIL import Image

from omni_kvlink import KVCacheBundle
from omni_kvlink.models.bagel import DenoiseParams

STAGES = Path(__file__).with_name("bagel_two_stage.py")


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
        "--capacity": str(args.capacity),
    }
    command = [sys.executable, str(STAGES), "--stage", stage]
    command += [word for option in options.items() for word in option]
    command += ["--in-place"] * args.in_place + ["--stream"] * args.stream
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
        copies = "copy" if ledger["copies"] == 1 else "copies"
        print(f"AR   {event['request']}: prefill {event['prefill_ms']:.1f} ms; tokens: {tokens}")
        print(
            f"     sent {ledger['nbytes']:,} bytes with {ledger['copies']} {copies}; "
            f"{ledger['reused_nbytes']:,} bytes not sent, being the same or a prefix; "
            f"digests {ledger['digests']}"
        )
    else:
        end = "\r" + " " * 60 + "\r" if sys.stdout.isatty() else ""
        parts = f"in {event['layers']} layers " if event["layers"] else ""
        print(f"{end}DiT  {event['request']}: received {parts}", end="")
        print(f"with {ledger['copies']} copies, painted in {event['render_ms']:.0f} ms")
    print(f"     ms: {phases}\n")


def tell(event: str, **facts: Any) -> None:
    # One write a line: both stages speak into the same pipe.
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def verdict(args: argparse.Namespace, request: Request, alone: KVCacheBundle) -> bool:
    """Compare what crossed, and what was painted, bit for bit."""
    crossed = KVCacheBundle.load(bundle_path(args, request))
    difference = crossed.difference(alone)
    painted = Image.open(image_path(args, request))
    expected = Image.open(Path(args.scratch) / f"{request.request_id}.png")
    same_image = painted.size == expected.size and painted.tobytes() == expected.tobytes()
    print(f"{request.request_id}: {image_path(args, request)}")
    print(f"  K/V   {'bit-exact' if not difference else 'DIFFERENT: ' + difference}")
    print(f"  image {'bit-exact' if same_image else 'DIFFERENT'}")
    return same_image and not difference


def image_path(args: argparse.Namespace, request: Request) -> str:
    return str(Path(args.out) / f"{request.request_id}.png")


def bundle_path(args: argparse.Namespace, request: Request) -> str:
    return str(Path(args.out) / f"{request.request_id}.safetensors")
