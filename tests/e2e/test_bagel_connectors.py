"""BAGEL in two processes over the other connectors: every bit is the same there, too."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import UnavailableError
from omni_kvlink.connectors.registry import backend, split_url
from support.e2e.stages import (
    REQUESTS,
    Stages,
    assert_equals_one_process,
    in_place,
    prefill,
    two_stages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

URLS = [
    "zmq+tcp://127.0.0.1:0",
    "zmq+ipc://{root}/link.sock",
    "ucx://127.0.0.1:0?trusted_network=1",
    f"auto://bagel-test-{os.getpid()}?tcp=127.0.0.1:0",
]
DTYPE = "bfloat16"


@pytest.fixture(scope="module", params=URLS, ids=lambda url: split_url(url)[0])
def stages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stages]:
    try:
        backend(split_url(request.param)[0])
    except UnavailableError as error:
        pytest.skip(str(error))
    root = tmp_path_factory.mktemp("link")
    with two_stages(request.param.format(root=root), root) as stages:
        yield stages


@pytest.mark.parametrize("name", ["text-to-image", "edit"])
def test_two_processes_equal_one(stages: Stages, name: str) -> None:
    _, _, bundle = prefill(stages.pipelines[DTYPE], name, name)
    stages.send(name, DTYPE, bundle, REQUESTS[name][1])
    assert_equals_one_process(stages, name, DTYPE, name)


def test_prefilled_in_the_links_memory(stages: Stages) -> None:
    name, key = "edit", "in-place"
    pipeline = stages.pipelines[DTYPE]
    caches = in_place(stages.allocate(key, DTYPE, {"gen": 700, "cfg_img": 60}))
    _, _, bundle = prefill(pipeline, name, key, caches)
    receipt = stages.send(key, DTYPE, bundle, REQUESTS[name][1])
    assert receipt.ledger.copies == 0
    pipeline.release_caches()
    assert_equals_one_process(stages, name, DTYPE, key)


def test_streamed_layer_by_layer(stages: Stages) -> None:
    name, key = "text-to-image", "streamed"
    _, _, bundle = prefill(stages.pipelines[DTYPE], name, key)
    stages.stream(key, DTYPE, bundle, REQUESTS[name][1])
    assert_equals_one_process(stages, name, DTYPE, key)
