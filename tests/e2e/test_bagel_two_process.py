"""BAGEL split over two processes equals one process, bit for bit: K, V, latents, image."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from omni_kvlink import (
    Allocation,
    KVCacheBundle,
    KVCacheTransferData,
    KVLink,
    PrefixOf,
    Receipt,
    SameAs,
)
from omni_kvlink.adapters import BagelAdapter, pack_generator
from omni_kvlink.models.bagel import (
    BagelContexts,
    BagelPipeline,
    DenoiseParams,
    InPlaceCache,
    make_tiny_checkpoint,
)
from omni_kvlink.schema import same_bytes

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

    link: KVLink
    process: subprocess.Popen[str]
    pipelines: dict[str, BagelPipeline]
    out: Path

    def send(self, key: str, dtype: str, bundle: KVCacheBundle, params: DenoiseParams) -> Receipt:
        receipt = self.link.put(bundle)
        self._ask(key, dtype, params, streamed=False)
        self._hear("painted")
        receipt.wait(timeout=10.0)
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
            self._ask(key, dtype, params, streamed=True)
            for name, at, keys, values in layers:
                out.write_layer(at, keys, values, branch=name)
                if (name, at) == ("gen", 0):
                    self._hear("layer 0 is here")
        self._hear("painted")
        assert out.receipt
        out.receipt.wait(timeout=10.0)
        return out.receipt

    def allocate(self, key: str, dtype: str, rooms: dict[str, int]) -> Allocation:
        """Memory of the link for so many tokens of each branch."""
        pipeline = self.pipelines[dtype]
        words = {"num_layers": pipeline.num_layers, "extra": {"generator": "A" * 6800}}
        plan = {
            name: KVCacheTransferData.blank(
                key,
                row=(pipeline.config.llm.num_key_value_heads, pipeline.config.llm.head_dim),
                dtype=pipeline.dtype,
                metadata={"kv_lens": [tokens], "ropes": [tokens], **words},
            )
            for name, tokens in rooms.items()
        }
        return self.link.allocate(KVCacheBundle(key, plan))

    def _ask(self, key: str, dtype: str, params: DenoiseParams, *, streamed: bool) -> None:
        job = {"key": key, "dtype": dtype, "streamed": streamed}
        assert self.process.stdin
        self.process.stdin.write(json.dumps({**job, "params": dataclasses.asdict(params)}) + "\n")
        self.process.stdin.flush()

    def _hear(self, words: str) -> None:
        assert self.process.stdout
        assert self.process.stdout.readline() == f"{words}\n"


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("bagel")
    checkpoint = str(make_tiny_checkpoint(root / "tiny", seed=3))
    pipelines = {
        dtype: BagelPipeline.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
        for dtype in ("float32", "bfloat16")
    }
    script = str(Path(__file__).with_name("dit_process.py"))
    sockets = str(root / "sockets")
    command = [sys.executable, script, "shm://bagel", sockets, checkpoint, str(root)]
    pipe = subprocess.PIPE
    with (
        KVLink.serve("shm://bagel", directory=sockets) as link,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process,
    ):
        yield Stages(link, process, pipelines, root)
        assert link.stats()["memory"]["used"] == 0
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(REQUESTS))
def test_two_processes_equal_one(stages: Stages, name: str, dtype: str) -> None:
    key = f"{name}-{dtype}"
    _, _, bundle = prefill(stages.pipelines[dtype], name, key)
    stages.send(key, dtype, bundle, REQUESTS[name][1])
    assert_equals_one_process(stages, name, dtype, key)


@pytest.mark.parametrize("name", list(REQUESTS))
def test_prefilled_in_the_links_memory(stages: Stages, name: str) -> None:
    dtype, key = "bfloat16", f"{name}-in-place"
    pipeline, memory = stages.pipelines[dtype], stages.link.stats()["memory"]["used"]
    allocation = stages.allocate(key, dtype, {"gen": 700, "cfg_img": 60})
    places = {tensor.data_ptr() for tensor in allocation.data.tensors()}
    contexts, _, bundle = prefill(pipeline, name, key, in_place(allocation))
    assert all(tensor.data_ptr() in places for tensor in bundle.tensors())
    receipt = stages.send(key, dtype, bundle, REQUESTS[name][1])
    assert receipt.ledger.copies == 0

    assert stages.link.stats()["memory"]["used"] > memory, "the contexts are still here"
    del contexts, bundle
    assert stages.link.stats()["memory"]["used"] > memory, "the pipeline remembers them"
    pipeline.forget()
    until(lambda: stages.link.stats()["memory"]["used"] == memory)
    assert_equals_one_process(stages, name, dtype, key)


@pytest.mark.parametrize("name", ["text-to-image", "edit"])
def test_streamed_layer_by_layer(stages: Stages, name: str) -> None:
    dtype, key = "float32", f"{name}-streamed"
    _, _, bundle = prefill(stages.pipelines[dtype], name, key)
    stages.stream(key, dtype, bundle, REQUESTS[name][1])
    assert_equals_one_process(stages, name, dtype, key)


def test_streamed_out_of_allocated_memory(stages: Stages) -> None:
    dtype, key = "float32", "edit-streamed-in-place"
    caches = in_place(stages.allocate(key, dtype, {"gen": 700, "cfg_img": 60}))
    _, _, bundle = prefill(stages.pipelines[dtype], "edit", key, caches)
    del caches
    receipt = stages.stream(key, dtype, bundle, EDIT)
    assert receipt.ledger.copies == 0
    assert_equals_one_process(stages, "edit", dtype, key)


def in_place(allocation: Allocation) -> dict[str, InPlaceCache]:
    data = allocation.data
    return {branch: InPlaceCache(**data[branch].layer_blocks) for branch in data}


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def assert_equals_one_process(stages: Stages, name: str, dtype: str, key: str) -> None:
    """What crossed and was painted, against the same request in this process, without a link."""
    pipeline = stages.pipelines[dtype]
    contexts, generator, bundle = prefill(pipeline, name, key)
    noise = pipeline.initial_noise(contexts.image_shape, generator)
    latent = pipeline.denoise(contexts, noise, REQUESTS[name][1])
    crossed = KVCacheBundle.load(stages.out / f"{key}.kv.safetensors")
    assert crossed.difference(bundle) == ""
    for branch in ("gen", "cfg_text", "cfg_img"):
        assert_same_cache(crossed[branch], getattr(contexts, branch))
    painted = load_file(stages.out / f"{key}.image")
    assert same_bytes(painted["latent"], latent.contiguous())
    assert same_bytes(painted["image"], pipeline.decode(latent))


def assert_same_cache(data: Any, context: Any) -> None:
    """Against the model's own tensors, not against what the adapter made of them."""
    assert list(data.metadata.kv_lens) == context.kv_lens
    assert list(data.metadata.ropes) == context.ropes
    cache = context.past_key_values
    for layer in range(data.metadata.num_layers):
        for name in ("key_cache", "value_cache"):
            mine, theirs = data.layer_blocks[name][layer], getattr(cache, name)[layer]
            assert (mine is None) == (theirs is None)
            assert mine is None or same_bytes(mine, theirs)


def test_what_is_not_sent_twice(stages: Stages) -> None:
    def kinds(name: str) -> dict[str, type]:
        inputs, _, how = REQUESTS[name]
        contexts = stages.pipelines["float32"].prefill(inputs, **how)
        bundle = BagelAdapter().export_contexts(
            {branch: getattr(contexts, branch) for branch in ("gen", "cfg_text", "cfg_img")},
            request_id=name,
        )
        return {branch: type(bundle.branches[branch]) for branch in ("cfg_text", "cfg_img")}

    assert kinds("text-to-image")["cfg_img"] is SameAs
    assert kinds("think") == {"cfg_text": PrefixOf, "cfg_img": PrefixOf}
    assert kinds("edit")["cfg_text"] is PrefixOf
    assert kinds("interleaved")["cfg_text"] is PrefixOf


def test_the_image_depends_on_what_crossed(stages: Stages) -> None:
    """One flipped sign in one layer's V gives another latent: the comparison above can fail."""
    pipeline = stages.pipelines["float32"]
    contexts = pipeline.prefill("a fox")
    noise = torch.randn(
        pipeline.initial_noise(contexts.image_shape).shape,
        generator=torch.Generator().manual_seed(1),
    )
    before = pipeline.denoise(contexts, noise, TEXT)
    values = contexts.gen.past_key_values.value_cache
    values[1] = -values[1]
    assert not torch.equal(pipeline.denoise(contexts, noise, TEXT), before)
