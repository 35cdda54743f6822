"""vLLM's plug-in group registers the connector in every process of an engine."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from vllm_fixtures import BLOCK, EngineProcess, prompt, transfer

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).resolve().parents[3]
GROUP = "vllm.general_plugins"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the entry points of pyproject.toml, as an installation has them."""
    if sys.version_info < (3, 11):
        pytest.skip("reading pyproject.toml needs Python 3.11, vLLM's own version here")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"][GROUP].items()]
    info = tmp_path / "omni_kvlink-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: omni-kvlink\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    return tmp_path


@pytest.mark.parametrize(("method", "by_path"), [("spawn", False), ("fork", True)])
def test_beside_other_connectors(
    model: Path, installed: Path, directory: Path, method: str, by_path: bool
) -> None:
    """`MultiConnector`, with the engine core in its own process, reports statistics by name."""
    url, options = f"shm://multi-{method}", {"directory": str(directory)}
    child = transfer("both", url=url, peers=[url], serve=options, connect=options)
    if not by_path:
        del child["kv_connector_module_path"]
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child]},
    }
    apart = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": method,
        "PYTHONPATH": os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]),
    }
    engine = EngineProcess(model, directory / f"{method}.log", several, env=apart)
    try:
        tokens = prompt(3 * BLOCK + 7)
        expected = engine.generate(tokens)
        got = engine.generate(tokens, engine.prefill(tokens))
        assert got["tokens"] == expected["tokens"]
        assert engine.count("received") == 1
    finally:
        engine.close()


def test_it_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plug-ins may be loaded more than once in a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    point = EntryPoint("omni_kvlink", "omni_kvlink.integrations.vllm:register", GROUP)
    for _ in range(2):
        point.load()()
    found = KVConnectorFactory.get_connector_class_by_name("OmniKVLinkConnector")
    assert found.__module__ == "omni_kvlink.integrations.vllm.connector"
