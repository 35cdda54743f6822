"""The DiT stage of the end-to-end tests: a process that generates images of the KV it receives.

Each line of standard input is a job; each answer names the files it wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from omni_kvlink import KVCacheBundle, KVConsumer, KVLink, Received, ReceivedStream
from omni_kvlink.adapters import BagelAdapter, unpack_generator
from omni_kvlink.models.bagel import (
    BagelContext,
    BagelContexts,
    BagelPipeline,
    DenoiseParams,
    NaiveCache,
)


def generate_image(
    link: KVConsumer, pipeline: BagelPipeline, job: dict[str, Any], out: Path
) -> None:
    received: Received | ReceivedStream
    if job["streamed"]:
        received = link.stream_get(job["key"], timeout=120.0)
        received.wait_for_layer(0, branch="gen")
        print("layer 0 is here", flush=True)
    else:
        received = link.get(job["key"], timeout=120.0, verify="full")
    with received as data:
        bundle = data.wait() if isinstance(data, ReceivedStream) else data
        assert isinstance(bundle, KVCacheBundle)
        bundle.save(out / f"{job['key']}.kv.safetensors")
        loaded = BagelAdapter().load_contexts(bundle, NaiveCache)
        metadata = bundle["gen"].metadata
        contexts = BagelContexts(
            gen=BagelContext(**loaded["gen"]),
            cfg_text=BagelContext(**loaded["cfg_text"]),
            cfg_img=BagelContext(**loaded["cfg_img"]),
            image_shape=metadata.image_shape,
        )
        params = {**job["params"], "cfg_interval": tuple(job["params"]["cfg_interval"])}
        noise = pipeline.initial_noise(
            contexts.image_shape, unpack_generator(metadata.extra["generator"])
        )
        latent = pipeline.denoise(contexts, noise, DenoiseParams(**params))
        image = pipeline.decode(latent)
        save_file({"latent": latent.contiguous(), "image": image}, out / f"{job['key']}.image")


def main() -> None:
    torch.set_num_threads(1)
    url, directory, checkpoint, out = sys.argv[1:]
    pipelines = {
        dtype: BagelPipeline.from_pretrained(checkpoint, dtype=getattr(torch, dtype), stage="dit")
        for dtype in ("float32", "bfloat16")
    }
    with KVLink.connect(url, timeout=120.0, directory=directory) as link:
        for line in sys.stdin:
            job = json.loads(line)
            generate_image(link, pipelines[job["dtype"]], job, Path(out))
            print("generated", flush=True)


if __name__ == "__main__":
    main()
