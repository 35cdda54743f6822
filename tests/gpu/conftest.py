"""What the tests before left is collected between the tests, and not in one."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from gpu_fixtures import DEVICE, REASON

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def loaded() -> None:
    """Torch loads a kernel at its first launch, which waits for the device."""
    if REASON is None:
        torch.zeros(8, dtype=torch.bfloat16, device=DEVICE).fill_(7)
        torch.cuda._sleep(1)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Freeing a link's memory waits for the device, and freeing a graph ends another's capture."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
