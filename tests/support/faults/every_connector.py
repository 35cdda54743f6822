"""The fixture `field`: a link under fault, over each connector and memory mode."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from support.connectors.zmq_addresses import fresh_url
from support.faults.harness import Field

if TYPE_CHECKING:
    from collections.abc import Iterator

UCX = pytest.param(
    "ucx",
    marks=pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is missing"),
)


@pytest.fixture(params=["pooled", "sealed", "inline", "tcp", "ipc", UCX])
def field(request: pytest.FixtureRequest, socket_dir: str) -> Iterator[Field]:
    name = request.param
    if name in ("tcp", "ipc", "ucx"):
        field = Field(socket_dir, url=fresh_url(name, socket_dir))
    else:
        field = Field(socket_dir, name)
    yield field
    field.close()
