"""Sampling params of `OmniDiffusion` that there are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine_fixtures import WAIT, checkpoint

from omni_kvlink import SchemaError
from omni_kvlink.engine import OmniDiffusion

if TYPE_CHECKING:
    from collections.abc import Iterator

RIGHT = {"height": 16, "width": 24, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def omni() -> Iterator[OmniDiffusion]:
    how = {"pipeline": "bagel_single_stage", "stages": [{"stage_id": 0}]}
    with OmniDiffusion(checkpoint(), how, dtype="float32") as made:
        yield made


@pytest.mark.parametrize("name", ["prompt_embeds", "negative_prompt_embeds", "latents", "hieght"])
def test_an_unknown_name_is_refused(omni: OmniDiffusion, name: str) -> None:
    wrong: dict[str, Any] = {**RIGHT, name: torch.zeros(2, 4)}
    with pytest.raises(SchemaError, match=f"^{name}: no sampling params here; .* height, width"):
        omni.submit("a fox", wrong, request_id="a")
    assert omni.submit("a fox", RIGHT, request_id="a").result(WAIT).error is None


def test_no_prompt_runs_if_the_params_of_one_are_wrong(omni: OmniDiffusion) -> None:
    before = omni.stats()[0]["steps"]
    with pytest.raises(SchemaError, match="latents"):
        omni.generate(["a fox", "an owl"], [RIGHT, {"latents": 1}], timeout=WAIT)
    (stats,) = omni.stats()
    assert (stats["steps"], stats["waiting"], stats["running"]) == (before, 0, 0)
