"""Fixtures: two hosts on a cable, and what the tests of connectors have, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cable import missing
from hosts import Hosts
from key_fixtures import Safe
from leak_checks import battlefield as battlefield
from leak_checks import start as start
from leak_checks import zmq_started as zmq_started


@pytest.fixture(scope="package")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Skips where there can be none."""
    why = missing()
    if why:
        pytest.skip(why)
    hosts = Hosts(Safe(tmp_path_factory.mktemp("keys")))
    yield hosts
    hosts.close()
