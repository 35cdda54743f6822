"""Fixtures of the connectors: a link under fault, in either memory mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_harness import Field
from leak_checks import battlefield as battlefield
from leak_checks import impatient as impatient
from leak_checks import start as start
from leak_checks import zmq_started as zmq_started


@pytest.fixture(params=["pooled", "sealed"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def field(battlefield: str, mode: str) -> Iterator[Field]:
    field = Field(battlefield, mode)
    yield field
    field.close()


@pytest.fixture
def pooled(battlefield: str) -> Iterator[Field]:
    field = Field(battlefield)
    yield field
    field.close()
