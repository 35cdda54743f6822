"""Fixtures: two hosts on a cable, and the fixtures of the connectors' tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.connectors.key_files import KeyFiles
from support.faults.leak_checks import socket_dir as socket_dir
from support.faults.leak_checks import start as start
from support.faults.leak_checks import zmq_started as zmq_started
from support.network.cable import missing
from support.network.hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Skip where there can be no namespaces."""
    why = missing()
    if why:
        pytest.skip(why)
    hosts = Hosts(KeyFiles(tmp_path_factory.mktemp("keys")))
    yield hosts
    hosts.close()
