"""BAGEL split over two processes equals one process, bit for bit: K, V, latents, image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from omni_kvlink import PrefixOf, SameAs
from omni_kvlink.adapters import BagelAdapter
from support.e2e.stages import (
    EDIT,
    REQUESTS,
    TEXT,
    Stages,
    assert_equals_one_process,
    in_place,
    prefill,
    two_stages,
)
from support.engine.fixtures import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import Payload


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with two_stages("shm://bagel", tmp_path_factory.mktemp("bagel")) as stages:
        yield stages


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
    addresses = addresses_of(allocation.data)
    contexts, _, bundle = prefill(pipeline, name, key, in_place(allocation))
    assert addresses_of(bundle) <= addresses
    receipt = stages.send(key, dtype, bundle, REQUESTS[name][1])
    assert receipt.ledger.copies == 0

    assert stages.link.stats()["memory"]["used"] > memory, "the contexts are still here"
    del contexts, bundle
    assert stages.link.stats()["memory"]["used"] > memory, "the pipeline remembers them"
    pipeline.release_caches()
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


def addresses_of(data: Payload) -> set[int]:
    return {cast("torch.Tensor", tensor).data_ptr() for tensor in data.tensors()}


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
    values = cast("Any", contexts.gen.past_key_values.value_cache)
    values[1] = -values[1]
    assert not torch.equal(pipeline.denoise(contexts, noise, TEXT), before)
