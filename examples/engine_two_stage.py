"""Many requests through the reference engine: an AR stage in its own process, a DiT stage here.

Prompts are read, their KV is sent over a link, and images are generated in batches of requests that
fit together. Then every image is compared with one made in this process, without an engine.

    python examples/engine_two_stage.py                      # tiny random weights, three connectors
    python examples/engine_two_stage.py --checkpoint DIR     # published weights
    python examples/engine_two_stage.py --deploy FILE        # a deploy file in vLLM-Omni's shape
    python examples/engine_two_stage.py --ray auto           # stages where Ray puts them; or local
    python examples/engine_two_stage.py --executor mp        # the workers in processes of their own
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from omni_kvlink.engine import OmniDiffusion
from omni_kvlink.models.bagel import BagelPipeline, DenoiseParams, make_tiny_checkpoint

CONNECTORS: dict[str, dict[str, Any]] = {
    "shared memory": {"name": "SharedMemoryConnector"},
    "ZMQ over TCP": {"name": "KVLinkConnector", "extra": {"url": "zmq+tcp://127.0.0.1:0"}},
    "ZMQ over a Unix socket": {"name": "KVLinkConnector", "extra": {"url": "zmq+ipc://{dir}/kv"}},
}
ON_RAY = {"by memory or network": {}, "ZMQ over TCP": {"url": "zmq+tcp://{node}:0"}}
"""The address of the node on which Ray puts a stage is known when it is there."""
SIZES = ((32, 32), (16, 24))


def deployment(args: argparse.Namespace, connector: dict[str, Any], scratch: str) -> dict[str, Any]:
    extra = {k: v.format(dir=scratch) for k, v in connector.get("extra", {}).items()}
    executor = {"distributed_executor_backend": args.executor}
    second = {
        **executor,
        "stage_id": 1,
        "max_num_seqs": args.batch,
        "request_batch_max_wait_ms": 50.0,
        "input_connectors": {"from_stage_0": "wire"},
    }
    return {
        "pipeline": "bagel",
        "stages": [{**executor, "stage_id": 0, "max_num_seqs": 4}, second],
        "connectors": {"wire": {**connector, "extra": extra}},
    }


def on_ray(args: argparse.Namespace, extra: dict[str, str]) -> dict[str, Any]:
    """The same, each stage in an actor; without a connector, by the nearest way."""
    how = deployment(args, {"name": "KVLinkConnector", "extra": {}}, "")
    how["connectors"]["wire"]["extra"] = extra
    for stage in how["stages"]:
        stage |= {"own_process": "ray", "ray": {"address": args.ray}}
    if not extra:
        del how["stages"][1]["input_connectors"]
    return how


def run(args: argparse.Namespace, name: str, deploy: Any, checkpoint: str) -> bool:
    prompts = [f"a red fox, number {number}" for number in range(args.requests)]
    params = [
        {"height": h, "width": w, "num_inference_steps": args.steps, "seed": number}
        for number in range(args.requests)
        for h, w in [SIZES[number * len(SIZES) // args.requests]]
    ]
    with OmniDiffusion(checkpoint, deploy, dtype="float32", num_threads=1) as omni:
        started = time.perf_counter()
        images = omni.generate(
            prompts, params, timeout=args.timeout, progress=sys.stderr.isatty(), output_type="pt"
        )
        seconds = time.perf_counter() - started
        dit = omni.stats()[1]
    print(f"{name}: {args.requests} requests in {dit['steps']} batches, {seconds:.2f} s")
    print(f"  {dit['kv']['nbytes']:,} bytes of KV received, {dit['kv']['charged']} held at the end")
    return compare(checkpoint, prompts, params, images)


def compare(checkpoint: str, prompts: list[str], params: list[Any], images: list[Any]) -> bool:
    """Against the same requests, one by one; in batches, sums may be in another order."""
    pipeline = BagelPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    worst = exact = 0
    for prompt, options, image in zip(prompts, params, images, strict=True):
        defaults = DenoiseParams.for_text_to_image()
        expected = pipeline.generate(
            prompt,
            dataclasses.replace(defaults, num_timesteps=options["num_inference_steps"]),
            generator=torch.Generator().manual_seed(options["seed"]),
            image_shape=(options["height"], options["width"]),
        )
        difference = int((expected.int() - image[0].int()).abs().max())
        worst, exact = max(worst, difference), exact + (difference == 0)
    print(f"  {exact} of {len(images)} images bit-exact; at most {worst} of 255 levels apart\n")
    return worst <= 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="", help="tiny and random if none")
    parser.add_argument("--deploy", default="", help="a deploy file, instead of three connectors")
    parser.add_argument("--ray", default="", help="address of a cluster: host:port, auto or local")
    parser.add_argument("--executor", default="uni", choices=["uni", "mp"])
    parser.add_argument("--requests", default=16, type=int)
    parser.add_argument("--batch", default=4, type=int, help="requests generated at once")
    parser.add_argument("--steps", default=12, type=int, help="denoising timesteps")
    parser.add_argument("--timeout", default=300.0, type=float, help="seconds for each run")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in the stages, for the same sums
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.checkpoint or str(make_tiny_checkpoint(Path(scratch) / "tiny"))
        if args.deploy:
            return 0 if run(args, args.deploy, args.deploy, checkpoint) else 1
        if args.ray:
            deployments = {name: on_ray(args, extra) for name, extra in ON_RAY.items()}
        else:
            deployments = {name: deployment(args, how, scratch) for name, how in CONNECTORS.items()}
        right = [run(args, name, deploy, checkpoint) for name, deploy in deployments.items()]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
