"""BAGEL over the engine: an AR stage in its own process, a DiT stage, the KV between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_kvlink import KVCacheBundle, KVLink
from omni_kvlink.engine import (
    KVConfig,
    OmniARConfig,
    OmniDiffusion,
    OmniDiffusionRequest,
    OmniDiffusionSamplingParams,
    StageProcess,
)
from omni_kvlink.models.bagel import DenoiseParams
from omni_kvlink.payload.views import same_bytes
from support.e2e.stages import picture
from support.engine.fixtures import WAIT, alone, bundle, checkpoint, pipeline

CONNECTORS = {
    "shm": {"name": "SharedMemoryConnector"},
    "zmq": {"name": "KVLinkConnector", "extra": {"url": "zmq+tcp://127.0.0.1:0"}},
    "tcp": {"name": "MooncakeTransferEngineConnector", "extra": {"protocol": "tcp"}},
}
PROMPTS: dict[str, Any] = {
    "text-to-image": ("a fox", {}),
    "cfg-img": ("a fox", {"guidance_scale_2": 1.5}),
    "edit": ([picture(1), "make it night"], {}),
    "interleaved": (["like this:", picture(2), "but blue"], {}),
}


def deployment(connector: str, **second: Any) -> dict[str, Any]:
    return {
        "pipeline": "bagel",
        "stages": [
            {"stage_id": 0, "max_num_seqs": 3},
            {"stage_id": 1, "input_connectors": {"from_stage_0": "wire"}, **second},
        ],
        "connectors": {"wire": CONNECTORS[connector]},
    }


def reference(name: str, seed: int) -> torch.Tensor:
    prompt, how = PROMPTS[name]
    fields = {"cfg_img_scale": how["guidance_scale_2"]} if how else {}
    return alone(prompt, seed, **fields)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_kv_transfer_end_to_end(connector: str, sockets: str) -> None:
    """Every byte of K and V, and every pixel, as in one process."""
    url = f"shm://e2e-{connector}" if connector == "shm" else "zmq+tcp://127.0.0.1:0"
    kv = KVConfig(sinks=(url,), sink_options={"directory": sockets})
    ar = OmniARConfig(checkpoint(), dtype="float32", num_blocks=256, block_size=4, kv=kv)
    with (
        StageProcess(ar) as stage,
        KVLink.connect(stage.sink_urls[0], timeout=WAIT, directory=sockets) as consumer,
    ):
        for seed, (name, (prompt, _)) in enumerate(PROMPTS.items()):
            params = OmniDiffusionSamplingParams(height=16, width=24, seed=seed)
            request = OmniDiffusionRequest(prompt, params, name, need_kv_transfer=True)
            output = stage.submit(request).result(WAIT)
            assert output.error is None
            expected = bundle(name, prompt, seed)
            with consumer.get(name, timeout=WAIT, verify="full") as data:
                assert isinstance(data, KVCacheBundle)
                assert list(data) == list(expected)
                for branch in expected:
                    ours, theirs = expected[branch], data[branch]
                    assert theirs.metadata.kv_lens == ours.metadata.kv_lens
                    assert theirs.metadata.ropes == ours.metadata.ropes
                    assert theirs.metadata.image_shape == ours.metadata.image_shape
                    pairs = zip(ours.tensors(), theirs.tensors(), strict=True)
                    assert all(same_bytes(mine, other) for mine, other in pairs)
                assert output.kv_sent
                assert output.kv_sent.tokens == expected["gen"].metadata.seq_len
        assert stage.stats()["free_blocks"] == 256

    with OmniDiffusion(checkpoint(), deployment(connector), dtype="float32") as omni:
        images = omni.generate(
            [
                prompt if isinstance(prompt, str) else tuple(prompt)
                for prompt, _ in PROMPTS.values()
            ],
            [
                {"height": 16, "width": 24, "num_inference_steps": 5, "seed": seed, **how}
                for seed, (_, how) in enumerate(PROMPTS.values())
            ],
            timeout=WAIT,
            output_type="pt",
        )
        size: Any = {"height": 16, "width": 24, "num_inference_steps": 5}
        (image,) = omni.generate("a fox", timeout=WAIT, output_type="pt", seed=0, **size)
        assert torch.equal(image, images[0])
    for seed, (name, image) in enumerate(zip(PROMPTS, images, strict=True)):
        assert torch.equal(image[0], reference(name, seed)), name


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 1, "temperature": 0.4},
        {"temperature": 0.0, "repetition_penalty": 3.0},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.7, "repetition_penalty": 1.05},
    ],
    ids=["likeliest", "penalty", "drawn"],
)
def test_think_mode_says_what_it_thought(tmp_path: Any, sampling: dict[str, Any]) -> None:
    file = tmp_path / "think.yaml"
    params = ", ".join(f"{name}: {value}" for name, value in sampling.items())
    file.write_text(
        "pipeline: bagel_think\n"
        "stages:\n"
        f"  - {{stage_id: 0, default_sampling_params: {{max_tokens: 8, {params}}}}}\n"
        "  - {stage_id: 1, default_sampling_params: {num_inference_steps: 5}}\n"
    )
    generator = torch.Generator().manual_seed(4)
    how: dict[str, Any] = {"think": True, "max_think_tokens": 8, "image_shape": (16, 24)}
    drawn = sampling["temperature"] > 1
    plain = pipeline().prefill("a fox", **how, generator=torch.Generator().manual_seed(4))
    own = {**sampling, "do_sample": drawn} if "repetition_penalty" in sampling else {}
    contexts = pipeline().prefill("a fox", **how, **own, generator=generator)
    assert (contexts.text == plain.text) == (not own)  # the params matter
    expected = pipeline().render(contexts, DenoiseParams(num_timesteps=5), generator=generator)
    with OmniDiffusion(checkpoint(), file, dtype="float32") as omni:
        (output,) = omni.generate(
            "a fox", {"height": 16, "width": 24, "seed": 4}, timeout=WAIT, on_error="return"
        )
        assert output.text == contexts.text
        assert torch.equal(output.result()[0], expected)


def test_one_stage_alone_reads_and_generates() -> None:
    how = {"pipeline": "bagel_single_stage", "stages": [{"stage_id": 0}]}
    with OmniDiffusion(checkpoint(), how, dtype="float32") as omni:
        (image,) = omni.generate(
            "a fox",
            {"height": 16, "width": 24, "num_inference_steps": 5, "seed": 0},
            timeout=WAIT,
        )
    assert torch.equal(torch.tensor(list(image.tobytes())), alone().flatten())
