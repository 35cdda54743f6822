"""Dynamo's own table of protocols has the connector; its requests and answers drive a transfer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")
pytest.importorskip(
    "dynamo.vllm.kv_connector_protocols",
    reason="Dynamo is not installed: make test-vllm-dynamo",
)

from dynamo.vllm import kv_connector_protocols as protocols
from vllm.config import KVTransferConfig

from omni_kvlink.integrations.vllm import register
from support.vllm.cache_layers import BLOCK
from support.vllm.engine_process import PATIENCE, prompt, transfer
from support.vllm.plugin import installed as installed
from support.vllm.plugin import python_path
from support.vllm.steps import SteppedEngine

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = prompt(3 * BLOCK + 7, seed=3)

Open = Callable[..., SteppedEngine]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Dynamo's table as it is before vLLM loads its plug-ins."""
    entries = protocols.KV_CONNECTOR_PROTOCOLS
    fresh = {name: made for name, made in entries.items() if name != "OmniKVLinkConnector"}
    monkeypatch.setattr(protocols, "KV_CONNECTOR_PROTOCOLS", fresh)
    monkeypatch.delitem(sys.modules, "omni_kvlink.integrations.vllm.dynamo", raising=False)
    return fresh


def engine_config(config: dict[str, Any]) -> Any:
    return SimpleNamespace(kv_transfer_config=KVTransferConfig(**config))


def configs() -> list[dict[str, Any]]:
    """The connector alone, and beside another one."""
    alone = transfer("producer", url="shm://p")
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [other, alone]},
    }
    return [alone, several]


@pytest.mark.parametrize("config", configs(), ids=["alone", "MultiConnector"])
def test_without_the_entry_dynamo_refuses_the_connector(
    table: dict[str, Any], config: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="OmniKVLinkConnector"):
        protocols.make_kv_connector_protocol(engine_config(config))
    register()
    made = protocols.make_kv_connector_protocol(engine_config(config))
    assert isinstance(made, protocols.KvConnectorProtocol)


def test_an_entry_of_dynamos_own_stays(table: dict[str, Any]) -> None:
    table["OmniKVLinkConnector"] = protocols.NixlConnectorProtocol
    register()
    assert table["OmniKVLinkConnector"] is protocols.NixlConnectorProtocol


def test_a_transfer_by_dynamos_requests(table: dict[str, Any], engine: Open) -> None:
    """The prefill request is Dynamo's, and so is what the decode request gets of its answer."""
    register()
    producer, consumer = engine("producer"), engine("consumer")
    made = protocols.make_kv_connector_protocol(engine_config(configs()[0]))
    producer.add("p", TOKENS, made.prefill_request_kv_transfer_params())
    assert producer.run("p") == ["length"]
    answer = SimpleNamespace(kv_transfer_params=producer.ended["p"][1])
    consumer.add("d", TOKENS, made.decode_request_kv_transfer_params(answer))
    assert consumer.run("d") == ["length"]
    assert consumer.counts["received"] == 1


def test_a_prefill_without_a_cache(table: dict[str, Any]) -> None:
    """An aborted prefill has no params: the decode worker computes the prompt."""
    register()
    made = protocols.make_kv_connector_protocol(engine_config(configs()[0]))
    assert made.decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params=None)) is None


LOADED = """
import sys
{imported}
from vllm.plugins import load_general_plugins
load_general_plugins()
table = sys.modules.get("dynamo.vllm.kv_connector_protocols")
print("OmniKVLinkConnector" in table.KV_CONNECTOR_PROTOCOLS if table else "not imported")
"""


@pytest.mark.parametrize(
    ("imported", "expected"),
    [("import dynamo.vllm.kv_connector_protocols", "True"), ("", "not imported")],
    ids=["a worker of Dynamo", "another process"],
)
def test_vllms_plugins_enter_it(installed: Path, imported: str, expected: str) -> None:
    """A worker imports Dynamo before it makes an engine; elsewhere nothing of it is imported."""
    environment = {**os.environ, **python_path(installed), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", LOADED.format(imported=imported)]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert output.stdout.splitlines()[-1:] == [expected], output.stderr
