"""What the BAGEL example asks of its two stages, how they are started, and what became of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from omni_kvlink import KVCacheBundle
from omni_kvlink.connectors.control.keys import generate
from omni_kvlink.models.bagel import DenoiseParams

if TYPE_CHECKING:
    import argparse

STAGES = Path(__file__).with_name("bagel_two_stage.py")


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks for; `image` is a file to edit."""

    request_id: str
    prompt: str
    image: str = ""
    question: str = ""  # about that image, for the AR stage
    seed: int = 7
    steps: int = 24

    def inputs(self) -> list[Any]:
        return ([Image.open(self.image)] if self.image else []) + [self.prompt]

    def params(self) -> DenoiseParams:
        kind = DenoiseParams.for_edit() if self.image else DenoiseParams.for_text_to_image()
        return dataclasses.replace(kind, num_timesteps=self.steps)


class Stages:
    """Both stages as processes, which load their weights before they get orders."""

    def __init__(self, args: argparse.Namespace):
        self._ends, self._is_random = link_ends(args), args.is_random
        self._events, write_end = os.pipe()
        self._stages = {stage: start_stage(args, stage, write_end) for stage in ("ar", "dit")}
        os.close(write_end)

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *error: object) -> None:
        """End those that still run: only those without orders do."""
        for stage in self._stages.values():
            stage.terminate()
            stage.wait()

    def run(self, requests: list[Request]) -> dict[str, int]:
        """Give orders and show the events; returns the stages that failed, with their status."""
        ar, dit = self._stages["ar"], self._stages["dit"]
        order(ar, self._ends["ar"], requests)
        for stage, other in ((ar, dit), (dit, ar)):
            threading.Thread(target=end_together, args=(stage, other)).start()
        with os.fdopen(self._events) as events:
            for line in events:
                event = json.loads(line)
                if event["event"] == "serving":  # only now is it known at which port
                    order(dit, {**self._ends["dit"], "url": event["url"]}, requests)
                show(event, is_random=self._is_random)
        return {name: stage.returncode for name, stage in self._stages.items() if stage.wait() != 0}


def end_together(stage: subprocess.Popen[str], other: subprocess.Popen[str]) -> None:
    """If one stage fails, the other may say what it saw of that, and is ended."""
    if stage.wait() != 0:
        assert other.stdin
        try:
            other.wait(timeout=5 if other.stdin.closed else 0)  # without orders it saw nothing
        except subprocess.TimeoutExpired:
            other.terminate()


def start_stage(args: argparse.Namespace, stage: str, output: int) -> subprocess.Popen[str]:
    options = {
        "--checkpoint": args.checkpoint,
        "--dtype": args.dtype,
        "--out": args.out,
        "--timeout": str(args.timeout),
        "--capacity": str(args.capacity),
    }
    command = shlex.split({"ar": args.prefix_ar, "dit": args.prefix_dit}[stage])
    command += [sys.executable, str(STAGES), "--stage", stage]
    command += [word for option in options.items() for word in option]
    command += ["--in-place"] * args.in_place + ["--stream"] * args.stream
    command += ["--direct"] * args.direct
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=True)


def link_ends(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """What the AR stage serves with, and the DiT stage connects with."""
    ends = {"ar": {"url": args.url}, "dit": {}}
    if args.keys:
        keys = Path(args.keys)
        for name in ("producer", "consumer"):
            if not (keys / f"{name}.secret").exists():
                generate(args.keys, name)  # as `kvlink keygen DIRECTORY NAME` does
        # Whose public key lies in the directory may connect.
        ends["ar"].update(keys=str(keys / "producer.secret"), peers=args.keys)
        ends["dit"].update(keys=str(keys / "consumer.secret"), peers=str(keys / "producer.public"))
    return ends


def order(stage: subprocess.Popen[str], end: dict[str, str], requests: list[Request]) -> None:
    """Tell a stage its end of the link, and all that it shall do."""
    assert stage.stdin
    with contextlib.suppress(BrokenPipeError), stage.stdin:  # its status says why it is gone
        for line in (end, *map(dataclasses.asdict, requests)):
            stage.stdin.write(json.dumps(line) + "\n")


def orders() -> tuple[dict[str, Any], list[Request]]:
    """In a stage: what `order` wrote."""
    end, *requests = map(json.loads, sys.stdin)
    return end, [Request(**request) for request in requests]


def show(event: dict[str, Any], *, is_random: bool) -> None:
    kind = event["event"]
    if kind == "step":
        if sys.stdout.isatty():
            bar = "█" * (30 * event["done"] // event["total"])
            print(f"\r  denoising {bar:<30} {event['done']}/{event['total']}", end="")
        return
    if kind == "serving":
        print(f"AR   serves {event['url']}\n")
        return
    if kind == "answered":
        print(f"AR   {event['request']}: {event['question']}")
        ids = event["token_ids"]
        print(f"     {len(ids)} tokens in {event['answer_ms']:.0f} ms: {event['text']!a}")
        if is_random:
            print(f"     token ids: {' '.join(map(str, ids))}")
        print()
        return
    ledger = event["ledger"]
    phases = ", ".join(f"{name} {1e3 * s:.2f}" for name, s in ledger["seconds"].items())
    copies = "copy" if ledger["copies"] == 1 else "copies"
    if kind == "warmed up":
        print(f"AR   first use of the link, which maps its memory: {ledger['nbytes']:,} bytes")
        print(f"     ms: {phases}\n")
        return
    if kind == "put":
        tokens = ", ".join(f"{name} {count}" for name, count in event["tokens"].items())
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
        print(f"with {ledger['copies']} {copies}, generated in {event['render_ms']:.0f} ms")
        print(f"     previews: {event['previews']}")
    print(f"     ms: {phases}\n")


def report(event: str, **facts: Any) -> None:
    # One write a line: both stages write to the same pipe.
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def verdict(
    args: argparse.Namespace, request: Request, alone: KVCacheBundle, answer: list[int]
) -> bool:
    """Compare the received KV and the generated image bit for bit, and the answer's tokens."""
    received = KVCacheBundle.load(bundle_path(args, request))
    difference = received.difference(alone)
    generated = Image.open(image_path(args, request))
    expected = Image.open(Path(args.scratch) / f"{request.request_id}.png")
    same_image = generated.size == expected.size and generated.tobytes() == expected.tobytes()
    print(f"{request.request_id}: {image_path(args, request)}")
    print(f"  K/V   {'bit-exact' if not difference else 'DIFFERENT: ' + difference[:200]}")
    print(f"  image {'bit-exact' if same_image else 'DIFFERENT'}")
    same_text = True
    if request.question:
        same_text = json.loads(Path(answer_path(args, request)).read_text()) == answer
        print(f"  text  {'same tokens' if same_text else 'DIFFERENT'}")
    return same_image and same_text and not difference


def conclude(is_same: bool, requests: int) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    text = f"The same: {requests} requests, every byte of K and V, every pixel, every token."
    print(f"\n{bold}{text if is_same else 'DIFFERENT: see above.'}{plain}")
    print("Next: docs/start.md (your first cache), docs/guides/any_engine.md (your own engine)")


def image_path(args: argparse.Namespace, request: Request) -> str:
    return str(Path(args.out) / f"{request.request_id}.png")


def preview_path(args: argparse.Namespace, request: Request) -> str:
    return str(Path(args.out) / f"{request.request_id}-previews.png")


def answer_path(args: argparse.Namespace, request: Request) -> str:
    return str(Path(args.out) / f"{request.request_id}-answer.json")


def bundle_path(args: argparse.Namespace, request: Request) -> str:
    return str(Path(args.out) / f"{request.request_id}.safetensors")
