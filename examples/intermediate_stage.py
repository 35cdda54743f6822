"""Three stages: AR, a DiT stage with few denoising steps, and a DiT stage with all of them.

The DiT stage in the middle sends on the KV that it received. The last stage makes the same image,
bit for bit, as directly after the AR stage. Each stage has a link to the next: shared memory, then
TCP.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import torch

from omni_kvlink.engine import OmniDiffusion
from omni_kvlink.engine.models.images import from_tensor
from omni_kvlink.models.bagel import BagelPipeline, DenoiseParams, make_tiny_checkpoint

DEPLOYMENT = {
    "pipeline": "bagel",
    "stages": [
        {"stage_id": 0},
        {
            "stage_id": 1,
            "input_connectors": {"from_stage_0": "memory"},
            "default_sampling_params": {"num_inference_steps": 4},
        },
        {
            "stage_id": 2,
            "input_connectors": {"from_stage_1": "network"},
            "default_sampling_params": {"num_inference_steps": 24},
        },
    ],
    "connectors": {
        "memory": {"name": "SharedMemoryConnector"},
        "network": {"name": "KVLinkConnector", "extra": {"url": "zmq+tcp://127.0.0.1:0"}},
    },
}
PROMPT, PARAMS = "a red fox in the snow", {"height": 32, "width": 32, "seed": 7}


def main() -> int:
    out = Path("out")
    out.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = str(make_tiny_checkpoint(Path(scratch) / "tiny"))
        with OmniDiffusion(checkpoint, DEPLOYMENT, dtype="float32", num_threads=1) as omni:
            (output,) = omni.generate(PROMPT, PARAMS, timeout=60.0, on_error="return")
            final = output.result()
        first, sketch, _ = output.stages
        print(f"AR    sent {first.kv_sent.nbytes:,} bytes, {first.kv_sent.tokens} tokens")
        print(f"DiT 1 made a sketch, and sent {sketch.kv_sent.nbytes:,} bytes on")
        for name, image in (("sketch", sketch.result()), ("final", final)):
            from_tensor(image).save(out / f"{name}.png")
            print(f"      {out / name}.png")
        right = [same(checkpoint, sketch.result(), 4), same(checkpoint, final, 24)]
    print(f"both as in one process: {'bit-exact' if all(right) else 'DIFFERENT'}")
    return 0 if all(right) else 1


def same(checkpoint: str, image: torch.Tensor, steps: int) -> bool:
    """Whether a pipeline in this process makes the same image."""
    params = dataclasses.replace(DenoiseParams.for_text_to_image(), num_timesteps=steps)
    expected = BagelPipeline.from_pretrained(checkpoint, dtype=torch.float32).generate(
        PROMPT,
        params,
        generator=torch.Generator().manual_seed(7),
        image_shape=(32, 32),
    )
    return torch.equal(image[0], expected)


if __name__ == "__main__":
    sys.exit(main())
