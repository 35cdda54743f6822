"""The path that a stage requires of its links, in its configuration."""

from __future__ import annotations

import os
from typing import Any

import pytest

from omni_kvlink import ConnectorError, SchemaError
from omni_kvlink.engine.config import DiffusionParallelConfig, KVConfig
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.kv.partitioned_source import connect_source
from omni_kvlink.engine.parallel.rank_coords import RankCoords

URLS = (f"shm://required-{os.getpid()}",)
RANK = RankCoords.of(0, DiffusionParallelConfig())


def connect(config: KVConfig) -> Any:
    return connect_source(config, config.receivers, heads=1, coords=RANK)


def test_a_required_path(sockets: str) -> None:
    """Neither side is given RDMA where only shared memory is; shared memory it is given."""
    here = {"directory": sockets}
    strict = {**here, "require": "rdma"}
    with pytest.raises(ConnectorError, match="require='rdma', and the path is shm"):
        KVSink(KVConfig(sinks=URLS, sink_options=strict))
    sink = KVSink(KVConfig(sinks=URLS, sink_options={**here, "require": ["shm"]}))
    with pytest.raises(ConnectorError, match="require='rdma', and the path is shm"):
        connect(KVConfig(sources=URLS, source_options=strict))
    assert sink.link.stats()["refused"] == {"path": 1}
    connect(KVConfig(sources=URLS, source_options={**here, "require": "shm"})).close()
    sink.link.close()


def test_a_misspelt_requirement() -> None:
    with pytest.raises(SchemaError, match=r"sink_options.require\[0\]='smh'.*did you mean shm"):
        KVConfig(sinks=URLS, sink_options={"require": ["smh"]})
