"""Fixtures for the engine's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_fixtures import WAIT

from omni_kvlink.engine.core import ar_engine, stage_engine
from omni_kvlink.engine.executor import remote_kv

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _slow_machine() -> Iterator[None]:
    """Workers that are not frozen have as long as they need to answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ar_engine, "_ANSWER", WAIT)
        patch.setattr(stage_engine, "_ANSWER", WAIT)
        patch.setattr(remote_kv, "_STATS_TIMEOUT", WAIT)
        yield
