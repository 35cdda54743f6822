"""BAGEL's two stages for the end-to-end tests: the AR stage here, the DiT stage in a process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from omni_kvlink import Allocation, KVCacheBundle, KVCacheTransferData, KVLink, KVProducer, Receipt
from omni_kvlink.adapters import BagelAdapter, pack_generator
from omni_kvlink.models.bagel import (
    BagelContexts,
    BagelPipeline,
    DenoiseParams,
    InPlaceCache,
    make_tiny_checkpoint,
)
from omni_kvlink.payload.views import same_bytes
from support.engine.fixtures import WAIT, until

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 6


def picture(seed: int) -> torch.Tensor:
    """An image to edit, uint8 [H, W, 3]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (64, 48, 3), dtype=torch.uint8, generator=generator)


TEXT = DenoiseParams(num_timesteps=STEPS)
EDIT = dataclasses.replace(DenoiseParams.for_edit(), num_timesteps=STEPS)
REQUESTS: dict[str, tuple[Any, DenoiseParams, dict[str, Any]]] = {
    "text-to-image": ("a fox", TEXT, {}),
    "cfg-img": ("a fox", dataclasses.replace(TEXT, cfg_img_scale=1.5), {}),
    "think": ("a fox", TEXT, {"think": True, "max_think_tokens": 8}),
    "edit": ([picture(1), "make it night"], EDIT, {}),
    "interleaved": (["like this:", picture(2), "but blue"], EDIT, {}),
}


@dataclasses.dataclass
class Stages:
    """The AR stage (here), the link, and the DiT stage's process."""

    link: KVProducer
    process: subprocess.Popen[str]
    pipelines: dict[str, BagelPipeline]
    out: Path

    def send(self, key: str, dtype: str, bundle: KVCacheBundle, params: DenoiseParams) -> Receipt:
        receipt = self.link.put(bundle)
        self._request(key, dtype, params, streamed=False)
        self._expect_line("generated")
        receipt.wait(timeout=WAIT)
        return receipt

    def stream(self, key: str, dtype: str, bundle: KVCacheBundle, params: DenoiseParams) -> Receipt:
        """The second layer is written when the first is known to be there."""
        layers = [
            (name, at, key, value)
            for name, branch in bundle.branches.items()
            if isinstance(branch, KVCacheTransferData) and not branch.is_empty
            for at, (key, value) in enumerate(zip(*branch.layer_blocks.values(), strict=True))
        ]
        with self.link.stream_put(bundle) as out:
            self._request(key, dtype, params, streamed=True)
            for name, at, keys, values in layers:
                out.write_layer(at, keys, values, branch=name)
                if (name, at) == ("gen", 0):
                    self._expect_line("layer 0 is here")
        self._expect_line("generated")
        assert out.receipt
        out.receipt.wait(timeout=WAIT)
        return out.receipt

    def allocate(self, key: str, dtype: str, rooms: dict[str, int]) -> Allocation:
        """Memory of the link for so many tokens of each branch."""
        pipeline = self.pipelines[dtype]
        extra_fields = {"num_layers": pipeline.num_layers, "extra": {"generator": "A" * 6800}}
        plan = {
            name: KVCacheTransferData.blank(
                key,
                row=(pipeline.config.llm.num_key_value_heads, pipeline.config.llm.head_dim),
                dtype=pipeline.dtype,
                metadata={"kv_lens": [tokens], "ropes": [tokens], **extra_fields},
            )
            for name, tokens in rooms.items()
        }
        return self.link.allocate(KVCacheBundle(key, plan))

    def _request(self, key: str, dtype: str, params: DenoiseParams, *, streamed: bool) -> None:
        job = {"key": key, "dtype": dtype, "streamed": streamed}
        assert self.process.stdin
        self.process.stdin.write(json.dumps({**job, "params": dataclasses.asdict(params)}) + "\n")
        self.process.stdin.flush()

    def _expect_line(self, extra_fields: str) -> None:
        assert self.process.stdout
        assert self.process.stdout.readline() == f"{extra_fields}\n"


@contextmanager
def two_stages(url: str, root: Path) -> Iterator[Stages]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    checkpoint = str(make_tiny_checkpoint(root / "tiny", seed=3))
    pipelines = {
        dtype: BagelPipeline.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
        for dtype in ("float32", "bfloat16")
    }
    script = str(Path(__file__).with_name("dit_process.py"))
    sockets = str(root / "sockets")
    pipe = subprocess.PIPE
    with KVLink.serve(url, directory=sockets) as link:
        command = [sys.executable, script, link.url, sockets, checkpoint, str(root)]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            yield Stages(link, process, pipelines, root)
            until(lambda: link.stats()["memory"]["used"] == 0)  # the releases arrive
    assert process.returncode == 0
    torch.set_num_threads(threads)


def prefill(
    pipeline: BagelPipeline, name: str, key: str, caches: dict[str, InPlaceCache] | None = None
) -> tuple[BagelContexts, torch.Generator, KVCacheBundle]:
    inputs, _, how = REQUESTS[name]
    generator = torch.Generator().manual_seed(5)
    contexts = pipeline.prefill(inputs, generator=generator, caches=caches, **how)
    bundle = BagelAdapter().export_contexts(
        {branch: getattr(contexts, branch) for branch in ("gen", "cfg_text", "cfg_img")},
        request_id=key,
        image_shape=contexts.image_shape,
        extra={"generator": pack_generator(generator)},
    )
    return contexts, generator, bundle


def in_place(allocation: Allocation) -> dict[str, InPlaceCache]:
    data = allocation.data
    assert isinstance(data, KVCacheBundle)
    blocks: dict[str, Any] = {branch: data[branch].layer_blocks for branch in data}
    return {branch: InPlaceCache(**layers) for branch, layers in blocks.items()}


def assert_equals_one_process(stages: Stages, name: str, dtype: str, key: str) -> None:
    """Compare the KV and the image of the other process with those of one process."""
    pipeline = stages.pipelines[dtype]
    contexts, generator, bundle = prefill(pipeline, name, key)
    noise = pipeline.initial_noise(contexts.image_shape, generator)
    latent = pipeline.denoise(contexts, noise, REQUESTS[name][1])
    received = KVCacheBundle.load(stages.out / f"{key}.kv.safetensors")
    assert received.difference(bundle) == ""
    for branch in ("gen", "cfg_text", "cfg_img"):
        assert_same_cache(received[branch], getattr(contexts, branch))
    generated = load_file(stages.out / f"{key}.image")
    assert same_bytes(generated["latent"], latent.contiguous())
    assert same_bytes(generated["image"], pipeline.decode(latent))


def assert_same_cache(data: Any, context: Any) -> None:
    """Compare with the model's own tensors, not with what the adapter made of them."""
    assert list(data.metadata.kv_lens) == context.kv_lens
    assert list(data.metadata.ropes) == context.ropes
    cache = context.past_key_values
    for layer in range(data.metadata.num_layers):
        for name in ("key_cache", "value_cache"):
            mine, theirs = data.layer_blocks[name][layer], getattr(cache, name)[layer]
            assert (mine is None) == (theirs is None)
            assert mine is None or same_bytes(mine, theirs)
