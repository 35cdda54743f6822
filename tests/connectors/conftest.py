"""Victims, and what they fight over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from battle import Field
from victims import battlefield as battlefield
from victims import impatient as impatient
from victims import start as start
from victims import zmq_started as zmq_started


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
