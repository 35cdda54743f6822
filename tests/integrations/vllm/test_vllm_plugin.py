"""vLLM's plug-in group registers the connector in every process of an engine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.vllm.engine_process import BLOCK, PATIENCE, EngineProcess, prompt, transfer
from support.vllm.plugin import GROUP, python_path
from support.vllm.plugin import installed as installed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(900),
]


def test_any_process_knows_the_connector(installed: Path) -> None:
    """A process that has loaded the plug-ins makes statistics again, from the name alone."""
    code = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
found = MultiConnector.build_kv_connector_stats({"OmniKVLinkConnector": {"sent": 7}})
print(type(found["OmniKVLinkConnector"]).__name__, found["OmniKVLinkConnector"].data)
"""
    environment = {**os.environ, **python_path(installed), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", code]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert output.stdout.splitlines()[-1:] == ["KVLinkStats {'sent': 7}"], output.stderr


def test_beside_other_connectors(model: Path, installed: Path, directory: Path) -> None:
    """`MultiConnector`, with the engine core in its own process, reports statistics by name.

    The other connector saves the same prompts, and loads none. A load that fails ends its request.
    """
    url, options = "shm://multi", {"directory": str(directory)}
    child = transfer("both", url=url, peers=[url], serve=options, connect=options)
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(directory / "saved")},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [child, other]},
    }
    apart = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        **python_path(installed),
    }
    engine = EngineProcess(model, directory / "multi.log", several, env=apart)
    try:
        tokens = prompt(3 * BLOCK + 7)
        expected = engine.generate(tokens)
        got = engine.generate(tokens, engine.prefill(tokens))
        assert got["tokens"] == expected["tokens"]
        assert engine.count("received") == 1
        assert list((directory / "saved").iterdir())
        fetch = {"do_remote_prefill": True, "transfer_id": "k", "remote_url": "shm://stranger"}
        assert engine.generate(prompt(BLOCK + 1, seed=9), fetch)["reason"] == "error"
        assert "'shm://stranger' is not one of this engine's peers: shm://multi" in engine.output()
        assert engine.count("load_failed") == 1
        assert engine.generate(tokens)["tokens"] == expected["tokens"]
    finally:
        engine.close()


REGISTERED = """
from importlib.metadata import EntryPoint
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

for _ in range(2):
    EntryPoint("omni_kvlink", "omni_kvlink.integrations.vllm:register", "GROUP").load()()
print(KVConnectorFactory.get_connector_class_by_name("OmniKVLinkConnector").__module__)
transfer = ECTransferConfig(ec_connector="OmniKVLinkECConnector", ec_role="ec_both")
print(ECConnectorFactory.get_connector_class(transfer).__module__)
"""


def test_it_is_registered_once() -> None:
    """Plug-ins may be loaded more than once in a process; vLLM takes no name twice."""
    program = [sys.executable, "-c", REGISTERED.replace("GROUP", GROUP)]
    output = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert output.split()[-2:] == [
        "omni_kvlink.integrations.vllm.connector",
        "omni_kvlink.integrations.vllm.encoder.connector",
    ]
