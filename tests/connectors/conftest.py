"""Fixtures of the connectors: a link under fault, in either memory mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.faults.harness import Field
from support.faults.leak_checks import impatient as impatient
from support.faults.leak_checks import socket_dir as socket_dir
from support.faults.leak_checks import start as start
from support.faults.leak_checks import zmq_started as zmq_started

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["pooled", "sealed", "inline"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def field(socket_dir: str, mode: str) -> Iterator[Field]:
    field = Field(socket_dir, mode)
    yield field
    field.close()


@pytest.fixture
def pooled(socket_dir: str) -> Iterator[Field]:
    field = Field(socket_dir)
    yield field
    field.close()
