"""The example's model in the engine, from outside: its images are those of one process."""

from __future__ import annotations

import dataclasses
import tempfile
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from add_model import MoeImageUtility, deployment
from moe_image import BRANCHES, MoeImageConfig, encode, generate, load, make_tiny_checkpoint

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVLink, KVMetadata
from omni_kvlink.engine import (
    AREngine,
    DiffusionEngine,
    DiffusionRequestBatch,
    EngineAsleepError,
    KVConfig,
    OmniARConfig,
    OmniDiffusion,
    OmniDiffusionConfig,
    OmniDiffusionRequest,
    OmniDiffusionSamplingParams,
    RequestAborted,
)
from omni_kvlink.engine.worker import GPUDiffusionWorker
from omni_kvlink.errors import KVLinkError, SchemaError
from support.engine.fixtures import WAIT, close_to, link
from support.engine.multiproc import BATCHES_OF_TWO, patient_calls
from support.processes.fork_server import NESTED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVProducer

PROMPTS = ["", "a fox", "a red fox in the snow, and another one that looks back at it"]
NAME = "add_model:MoeImageUtility"
STEPS = 4
_kept: list[tempfile.TemporaryDirectory[str]] = []


@cache
def checkpoint() -> str:
    _kept.append(directory := tempfile.TemporaryDirectory(prefix="kvl-moe-"))
    return str(make_tiny_checkpoint(directory.name))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """As many as in the stages: sums are ordered by threads."""
    torch.set_num_threads(1)


@cache
def networks() -> Any:
    return load(checkpoint(), "all")


def alone(prompt: str, seed: int, **options: Any) -> torch.Tensor:
    """The image without an engine."""
    model, decoder = networks()
    return generate(model, decoder, prompt, seed=seed, **{"steps": STEPS, **options})


def params(seed: int = 0, **fields: Any) -> dict[str, Any]:
    return {"num_inference_steps": STEPS, "seed": seed, **fields}


def request(name: str, prompt: Any = "a fox", seed: int = 0, **own: Any) -> OmniDiffusionRequest:
    fields = {key: own.pop(key) for key in list(own) if key.startswith("need_")}
    given = OmniDiffusionSamplingParams(**params(seed, **own))
    return OmniDiffusionRequest(prompt, given, name, **fields)


def config(**fields: Any) -> OmniDiffusionConfig:
    how: dict[str, Any] = {"dtype": "float32", "model_class_name": NAME, "num_threads": 1, **fields}
    return OmniDiffusionConfig(checkpoint(), **how)


def started(**dit: Any) -> OmniDiffusion:
    return OmniDiffusion(checkpoint(), deployment(**dit), dtype="float32", num_threads=1)


def bundle(name: str, **change: Any) -> KVCacheBundle:
    """What the AR stage sends for "a fox", but for the changes."""
    branches = {}
    for branch in change.get("branches", BRANCHES):
        ids = encode("a fox")[branch]
        kv = networks()[0].prefill(ids)[: change.get("layers", 3)]
        keys, values = (
            [each.to(change.get("dtype")) for each in part] for part in zip(*kv, strict=True)
        )
        if heads := change.get("heads"):
            keys, values = ([each[:, :heads] for each in part] for part in (keys, values))
        shape = change.get("image_shape", (32, 32))
        metadata = KVMetadata((len(ids),), (len(ids),), len(kv), image_shape=shape)
        layers = {"key_cache": keys, "value_cache": values}
        branches[branch] = KVCacheTransferData(name, layers, (), metadata)
    return KVCacheBundle(name, branches)


@pytest.fixture(scope="module")
def omni() -> Iterator[OmniDiffusion]:
    torch.set_num_threads(1)
    with started() as made:
        yield made


def test_two_stages_make_the_images_of_one_process(omni: OmniDiffusion) -> None:
    """The AR stage is a process of its own, which imports the model from where this one does."""
    for seed, prompt in enumerate(PROMPTS):
        (output,) = omni.generate(prompt, params(seed), timeout=WAIT, on_error="return")
        assert torch.equal(output.result()[0], alone(prompt, seed))
        sent = output.stages[0].kv_sent
        tokens = 2 + len(prompt)
        assert (sent.tokens, sent.image_shape) == (tokens, (32, 32))
        assert sent.nbytes >= len(BRANCHES) * 3 * 2 * tokens * 2 * 16 * 4  # and digests, a header
    assert omni.stages[1].config.kv.verify == "full"
    assert omni.stats()[1]["kv"]["charged"] == 0


def test_what_a_request_asks_for_reaches_both_stages(omni: OmniDiffusion) -> None:
    own = {"height": 16, "width": 24, "guidance_scale": 2.0, "timestep_shift": 1.0}
    (images,) = omni.generate({"prompt": "a fox"}, params(5, **own), timeout=WAIT, output_type="pt")
    how: dict[str, Any] = {"size": (16, 24), "guidance_scale": 2.0, "shift": 1.0}
    assert torch.equal(images[0], alone("a fox", 5, **how))
    assert not torch.equal(images[0], alone("a fox", 5, **{**how, "guidance_scale": 3.0}))
    unguided = params(5, guidance_scale=1.0, num_outputs_per_prompt=2)
    (images,) = omni.generate("a fox", unguided, timeout=WAIT, output_type="pt")
    assert close_to(images[0], alone("a fox", 5, guidance_scale=1.0))
    assert not close_to(images[1], images[0])


def test_both_stages_sleep(omni: OmniDiffusion) -> None:
    for level in (1, 2):
        assert [stage.sleep(level) for stage in omni.stages] == [True, True]
        with pytest.raises(EngineAsleepError):
            omni.generate("a fox", params(), timeout=WAIT)
        assert [stage.wake_up() for stage in omni.stages] == [True, True]
        (images,) = omni.generate("a fox", params(7), timeout=WAIT, output_type="pt")
        assert torch.equal(images[0], alone("a fox", 7))


@pytest.mark.parametrize(
    ("prompt", "own", "word"),
    [
        ("a fox", {"negative_prompt": "a box"}, "negative_prompt 'a box': this model supports"),
        ("a fox", {"latents": torch.zeros(1, 4, 8, 8)}, "latents"),
        ("a fox", {"think": True}, "think True"),
        ("a fox", {"modalities": ("text",)}, "modalities"),
        ("a fox", {"height": 30}, "height 30, width 32: multiples of 4"),
        ([torch.zeros(8, 8, 3, dtype=torch.uint8), "a fox"], {}, "one text"),
        ([1, 2], {}, "one text"),
    ],
)
def test_what_the_model_cannot_do_is_an_error(prompt: Any, own: dict[str, Any], word: str) -> None:
    with DiffusionEngine(config(stage="all")) as engine:
        one = request("r", prompt, **own)
        with pytest.raises(SchemaError, match=word):
            engine.submit(one).result(WAIT).result()


def test_the_same_errors_in_two_stages(omni: OmniDiffusion) -> None:
    for own, word in (({"think": True}, "think True"), ({"width": 30}, "multiples of 4")):
        with pytest.raises(SchemaError, match=word):
            omni.generate("a fox", params(**own), timeout=WAIT)


def test_the_kv_that_an_ar_stage_sends(sockets: str) -> None:
    """K and V of both branches, bit for bit, of the model's shape and dtype."""
    url, options = "shm://moe-ar", dict[str, Any](directory=sockets)
    kv = KVConfig(sinks=(url,), sink_options=options)
    how: dict[str, Any] = {"model_class_name": NAME, "dtype": "float32", "kv": kv}
    stage = OmniARConfig(checkpoint(), num_blocks=12, num_threads=1, max_num_seqs=2, **how)
    with AREngine(stage) as engine, KVLink.connect(url, timeout=WAIT, **options) as consumer:
        coming = [
            engine.submit(request(f"r{seed}", prompt, seed, need_kv_transfer=True))
            for seed, prompt in enumerate(PROMPTS)
        ]
        for future in coming:
            assert future.result(WAIT).error is None
        for seed, prompt in enumerate(PROMPTS):
            with consumer.get(f"r{seed}", timeout=WAIT, verify="full") as received:
                assert isinstance(received, KVCacheBundle)
                assert list(received) == list(BRANCHES)
                for branch, ids in encode(prompt).items():
                    check(received[branch], networks()[0].prefill(ids))
        assert engine.stats()["free_blocks"] == 12


def check(found: KVCacheTransferData, kv: Any) -> None:
    assert found.metadata.ropes == found.metadata.kv_lens == (len(kv[0][0]),)
    assert (found.metadata.num_layers, found.metadata.dtype) == (3, "float32")
    parts = zip(*kv, strict=True)
    for part, expected in zip(("key_cache", "value_cache"), parts, strict=True):
        for one, other in zip(found.layer_blocks[part], expected, strict=True):
            assert isinstance(one, torch.Tensor)
            assert one.shape == (len(other), 2, 16)
            assert torch.equal(one, other)


def test_a_batch_is_one_pass(sockets: str) -> None:
    how = {"stage": "all", "max_num_seqs": 2, **BATCHES_OF_TWO}
    with DiffusionEngine(config(**how)) as engine:
        made = [engine.submit(request(prompt[:5] or "r", prompt, 3)) for prompt in PROMPTS[1:]]
        images = [future.result(WAIT).result()[0] for future in made]
        assert engine.stats()["steps"] == 1
    for prompt, image in zip(PROMPTS[1:], images, strict=True):
        assert close_to(image, alone(prompt, 3))


@pytest.mark.parametrize("how", [{"step_execution": True, "max_num_seqs": 3}, {}])
def test_one_stage_alone(how: dict[str, Any]) -> None:
    """It reads prompts itself; with `step_execution` requests of other steps share its passes."""
    stages = [{"stage_id": 0, **how}]
    deploy = {"pipeline": "single_stage", "model_class_name": NAME, "stages": stages}
    with OmniDiffusion(checkpoint(), deploy, dtype="float32", num_threads=1) as made:
        steps = [3, 6, 4]
        own = [params(seed, num_inference_steps=count) for seed, count in enumerate(steps)]
        images = made.generate(PROMPTS, own, timeout=WAIT, output_type="pt")
        assert how == {} or made.stats()[0]["steps"] < sum(steps)
    for seed, (prompt, image) in enumerate(zip(PROMPTS, images, strict=True)):
        assert close_to(image[0], alone(prompt, seed, steps=steps[seed]))
        assert how or torch.equal(image[0], alone(prompt, seed, steps=steps[seed]))


def test_guidance_ranks_make_the_images_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each receives and computes one branch."""
    monkeypatch.setenv(NESTED, "1")
    with patient_calls(), started(cfg_parallel_size=2) as made:
        for seed, prompt in enumerate(PROMPTS):
            (output,) = made.generate(prompt, params(seed), timeout=2 * WAIT, on_error="return")
            assert torch.equal(output.result()[0], alone(prompt, seed))
            both = 2 * 3 * 2 * (2 + len(prompt)) * 2 * 16 * 4
            assert output.stages[0].kv_sent.nbytes < both or not prompt
        unguided = params(1, guidance_scale=1.0)
        (images,) = made.generate("a fox", unguided, timeout=2 * WAIT, output_type="pt")
        assert torch.equal(images[0], alone("a fox", 1, guidance_scale=1.0))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layers": 2}, r"'r' has, in gen, .*\(2, .*computes with \(3, "),
        ({"heads": 1}, r"\{\(1, 16\)\}.*computes with .*\{\(2, 16\)\}"),
        ({"dtype": torch.bfloat16}, r"torch.bfloat16.*computes with .*torch.float32"),
        ({"branches": ["gen"]}, "the KV of 'r' lacks cfg_text"),
        ({"branches": ["cfg_text"]}, "the KV of 'r' lacks gen"),
        ({"image_shape": (64, 64)}, r"is for \(64, 64\), not for 32 x 32"),
        ({"image_shape": None}, "is for None, not for 32 x 32"),
    ],
)
def test_a_kv_that_does_not_fit(sockets: str, change: dict[str, Any], word: str) -> None:
    with link(sockets) as producer, DiffusionEngine(receiving(producer, sockets)) as engine:
        producer.put(bundle("r", **change))
        producer.put(bundle("good"))
        with pytest.raises(SchemaError, match=word):
            engine.submit(request("r", need_kv_receive=True)).result(WAIT).result()
        good = engine.submit(request("good", seed=2, need_kv_receive=True)).result(WAIT)
        assert torch.equal(good.result()[0], alone("a fox", 2))


def test_one_cache_is_no_kv_of_this_model(sockets: str) -> None:
    with link(sockets) as producer, DiffusionEngine(receiving(producer, sockets)) as engine:
        producer.put(bundle("r")["gen"])
        with pytest.raises(SchemaError, match="is one cache; gen, cfg_text are needed"):
            engine.submit(request("r", need_kv_receive=True)).result(WAIT).result()


def test_a_stage_in_the_middle_sends_the_kv_on(sockets: str) -> None:
    options: dict[str, Any] = {"directory": sockets}
    with link(sockets) as producer:
        how = receiving(producer, sockets)
        kv = dataclasses.replace(how.kv, sinks=("shm://moe-middle",), sink_options=options)
        with (
            DiffusionEngine(dataclasses.replace(how, kv=kv)) as engine,
            KVLink.connect("shm://moe-middle", timeout=WAIT, **options) as consumer,
        ):
            producer.put(bundle("r"))
            middle = request("r", need_kv_receive=True, need_kv_transfer=True)
            assert torch.equal(engine.submit(middle).result(WAIT).result()[0], alone("a fox", 0))
            with consumer.get("r", timeout=WAIT, verify="full") as received:
                assert isinstance(received, KVCacheBundle)
                assert received.difference(bundle("r")) == ""


def receiving(producer: KVProducer, sockets: str) -> OmniDiffusionConfig:
    source_options = {"directory": sockets}
    kv = KVConfig(sources=(producer.url,), source_options=source_options, timeout=WAIT)
    return config(kv=kv)


@pytest.mark.parametrize(
    "own",
    [
        {"enable_layerwise_offload": True},
        {"enable_cpu_offload": True},
        {"vae_dtype": "bfloat16"},
    ],
)
def test_settings_that_the_model_supports(own: dict[str, Any]) -> None:
    worker = GPUDiffusionWorker(0, 0, config(stage="all", **own))
    try:
        worker.init_device()
        (output,) = worker.execute_model([prepared("r", seed=4)]).runner_outputs
        is_same = torch.equal(output.result.result()[0], alone("a fox", 4))
        assert is_same == ("vae_dtype" not in own)
    finally:
        worker.shutdown()


@pytest.mark.parametrize(
    ("own", "word"),
    [
        ({"enforce_eager": False}, "has no layers to compile"),
        ({"warmup_sizes": ((32, 32),)}, "has no warm-up"),
        ({"cache_backend": "tea_cache"}, "MoeImagePipeline does not offer"),
        ({"attention_backend": "sage"}, "attention_backend 'sage'"),
    ],
)
def test_settings_that_it_does_not_support(own: dict[str, Any], word: str) -> None:
    with pytest.raises((KVLinkError, ValueError), match=word):
        DiffusionEngine(config(stage="all", **own))


def test_an_ar_stage_without_a_prefix_cache() -> None:
    with pytest.raises(ValueError, match="MoeImageUtility has no prefix_tokens"):
        AREngine(OmniARConfig(checkpoint(), model_class_name=NAME, enable_prefix_caching=True))


def prepared(name: str, seed: int) -> OmniDiffusionRequest:
    one = request(name, seed=seed)
    MoeImageUtility.prepare(one)
    return one


def test_an_abort_is_its_own_requests() -> None:
    """The other image of the batch is made; a batch of aborted requests ends at once."""
    utility = MoeImageUtility(config(stage="all"), torch.device("cpu"))
    first, second = prepared("a", 1), prepared("b", 2)
    first.is_cancelled = lambda: True
    with torch.inference_mode():
        aborted, made = utility.pipeline.forward(DiffusionRequestBatch([first, second]))
    assert isinstance(aborted.error, RequestAborted)
    assert close_to(made.result()[0], alone("a fox", 2))
    second.is_cancelled = first.is_cancelled
    outputs = utility.pipeline.forward(DiffusionRequestBatch([first, second]))
    assert [str(one.error) for one in outputs] == ["aborted after 0 denoising steps"] * 2


def test_an_image_depends_on_the_prompt_the_seed_and_each_expert() -> None:
    model, decoder = networks()
    image = alone("a fox", 0)
    assert not close_to(image, alone("a box", 0))
    assert not close_to(image, alone("a fox", 1))
    for number in range(MoeImageConfig().num_experts):
        other, _ = load(checkpoint(), "all")
        other.get_parameter(f"layers.1.mlp.experts.{number}.down_proj.weight").zero_()
        assert not torch.equal(image, generate(other, decoder, "a fox", steps=STEPS))
    assert torch.equal(image, generate(model, decoder, "a fox", steps=STEPS))


def test_the_text_does_not_depend_on_what_follows() -> None:
    """Attention is causal there; so K and V of a text are those of any denoising step."""
    longer, short = (networks()[0].prefill(encode(text)["gen"][:-1]) for text in ("a fox", "a"))
    for (k, v), (key, value) in zip(longer, short, strict=True):
        torch.testing.assert_close(k[: len(key)], key)
        torch.testing.assert_close(v[: len(value)], value)
