"""One tiny checkpoint for all tests of the reference model, and its pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline
from omni_kvlink.models.bagel import make_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from omni_kvlink.models.bagel import BagelContext

SHAPE = (16, 24)  # height and width: 4 x 6 latent tokens


def stored(context: BagelContext, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer of a context that is not empty."""
    cache = context.past_key_values
    keys, values = cache.key_cache[layer], cache.value_cache[layer]
    assert keys is not None
    assert values is not None
    return keys, values


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("bagel"))


@pytest.fixture(scope="session")
def exact(checkpoint: Path) -> OmniBagelPipeline:
    """The float32 pipeline."""
    return OmniBagelPipeline.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="session")
def short(checkpoint: Path) -> OmniBagelPipeline:
    """The bfloat16 pipeline."""
    return OmniBagelPipeline.from_pretrained(checkpoint, dtype=torch.bfloat16)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def pipeline(
    request: pytest.FixtureRequest, exact: OmniBagelPipeline, short: OmniBagelPipeline
) -> OmniBagelPipeline:
    return exact if request.param == torch.float32 else short


@pytest.fixture
def seeded() -> Callable[[int], torch.Generator]:
    return lambda seed: torch.Generator().manual_seed(seed)


@pytest.fixture
def photo() -> torch.Tensor:
    """An image with structure: uint8 [40, 56, 3]."""
    rows, columns = torch.arange(40)[:, None, None], torch.arange(56)[None, :, None]
    return ((rows * 5 + columns * 3 * torch.tensor([1, 2, 3])) % 256).to(torch.uint8)
