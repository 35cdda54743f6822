"""What the tests before left is collected between the tests, and not in one."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Freeing a link's memory waits for the device, and freeing a graph ends another's capture."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
