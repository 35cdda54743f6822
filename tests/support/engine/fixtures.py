"""What the engine's tests start from: a checkpoint, a link, requests, and what they should give."""

from __future__ import annotations

import itertools
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import KVCacheBundle, KVLink, KVProducer
from omni_kvlink.adapters import BagelAdapter, pack_generator
from omni_kvlink.engine import (
    OmniDiffusionConfig,
    OmniDiffusionRequest,
    OmniDiffusionSamplingParams,
)
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline
from omni_kvlink.models.bagel import DenoiseParams, make_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHAPE = (16, 24)
STEPS = 5
WAIT = 600.0
"""Seconds until a test that waits for an event gives up; nothing is proven by them."""
_numbers = itertools.count()


def has_calls(engine: Any) -> bool:
    """Return whether a call, such as `sleep`, waits until no request of an engine runs."""
    # Not public: a call that waits has no effect before it runs.
    return bool(engine._calls)


@cache
def checkpoint() -> str:
    """Made once, and gone with the process."""
    directory = tempfile.TemporaryDirectory(prefix="kvl-engine-")
    _kept.append(directory)
    return str(make_tiny_checkpoint(Path(directory.name)))


_kept: list[tempfile.TemporaryDirectory[str]] = []


@cache
def pipeline(dtype: torch.dtype = torch.float32) -> OmniBagelPipeline:
    """The whole model in this process: what everything is compared with."""
    return OmniBagelPipeline.from_pretrained(checkpoint(), dtype=dtype)


def close_to(image: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within a level of 255: batches and merged weights are rounded otherwise."""
    return bool((image.int() - expected.int()).abs().max() <= 1)


def params(seed: int = 0, **fields: Any) -> OmniDiffusionSamplingParams:
    how = {"height": SHAPE[0], "width": SHAPE[1], "num_inference_steps": STEPS, "seed": seed}
    return OmniDiffusionSamplingParams(**{**how, **fields})


def request(name: str, prompt: Any = "a fox", seed: int = 0, **fields: Any) -> OmniDiffusionRequest:
    """A request whose KV comes from the stage before; `fields` of it, or of its sampling params."""
    own = {key: fields.pop(key) for key in list(fields) if key in REQUEST_FIELDS}
    own = {"need_kv_receive": True, **own}
    return OmniDiffusionRequest(prompt, params(seed, **fields), name, **own)


REQUEST_FIELDS = {
    *("need_kv_receive", "need_kv_transfer", "kv_nbytes", "kv_timeout", "kv_sender_info"),
}


def bundle(
    name: str,
    prompt: Any = "a fox",
    seed: int = 0,
    shape: tuple[int, int] = SHAPE,
    dtype: torch.dtype = torch.float32,
) -> KVCacheBundle:
    """What the AR stage would send for it."""
    generator, model = torch.Generator().manual_seed(seed), pipeline(dtype)
    contexts = model.prefill(prompt, image_shape=shape, generator=generator)
    model.release_caches()
    return BagelAdapter().export_contexts(
        {branch: getattr(contexts, branch) for branch in ("gen", "cfg_text", "cfg_img")},
        request_id=name,
        image_shape=contexts.image_shape,
        extra={"generator": pack_generator(generator)},
    )


def allocate_copy(
    producer: KVProducer, name: str, part: str, *, layer: int
) -> tuple[KVCacheBundle, torch.Tensor]:
    """`bundle(name)` in the link's memory, and the tensor of one layer of its "gen" there."""
    data = producer.allocate(bundle(name)).data
    assert isinstance(data, KVCacheBundle)
    for target, source in zip(data.tensors(), bundle(name).tensors(), strict=True):
        assert isinstance(target, torch.Tensor)
        assert isinstance(source, torch.Tensor)
        target.copy_(source)
    tensor = data["gen"].layer_blocks[part][layer]
    assert isinstance(tensor, torch.Tensor)
    return data, tensor


def alone(prompt: Any = "a fox", seed: int = 0, **fields: Any) -> torch.Tensor:
    """The image of a request without an engine, uint8 [H, W, 3]."""
    shape = fields.pop("height", SHAPE[0]), fields.pop("width", SHAPE[1])
    how = {"num_timesteps": fields.pop("num_inference_steps", STEPS), **fields}
    edit = not isinstance(prompt, str) and any(not isinstance(item, str) for item in prompt)
    defaults = DenoiseParams.for_edit() if edit else DenoiseParams.for_text_to_image()
    params = DenoiseParams(**{**vars(defaults), **how})
    generator = torch.Generator().manual_seed(seed)
    image = pipeline().generate(prompt, params, generator=generator, image_shape=shape)
    pipeline().release_caches()
    return image


def url(scheme: str = "shm") -> str:
    if scheme == "zmq":
        return "zmq+tcp://127.0.0.1:0"
    return f"{scheme}://engine-test-{next(_numbers)}"


def until(true: Callable[[], Any]) -> None:
    """Wait for something that no event announces: a message on its way, a state of a thread."""
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def link(sockets: str, scheme: str = "shm", **options: Any) -> Iterator[KVProducer]:
    """The AR stage's end, in this process; nothing of its memory may be used at the end."""
    options = {"directory": sockets, "quota": 64 << 20, **options}
    with KVLink.serve(url(scheme), **options) as served:
        yield served
        deadline = time.monotonic() + WAIT
        while served.stats()["memory"]["used"] and time.monotonic() < deadline:
            time.sleep(0.01)  # releases are on their way
        assert served.stats()["memory"]["used"] == 0, served.stats()


def config(source: KVProducer | None, sockets: str = "", **fields: Any) -> OmniDiffusionConfig:
    """A diffusion stage that receives from a link; `kv_…` are fields of its `KVConfig`."""
    kv = {key.removeprefix("kv_"): fields.pop(key) for key in list(fields) if key[:3] == "kv_"}
    kv = {"timeout": WAIT, **kv}
    if source is not None:
        kv |= {"sources": (source.url,), "source_options": {"directory": sockets}}
    how: dict[str, Any] = {"dtype": "float32", **fields}
    return OmniDiffusionConfig(checkpoint(), kv=KVConfig(**kv), **how)
