"""Without vLLM: importing costs nothing, using the connector says what to install."""

from __future__ import annotations

import subprocess
import sys

from support.processes.fork_server import new_interpreters


def output(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    with new_interpreters():
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_importing_the_integrations_imports_no_engine() -> None:
    code = "import sys, omni_kvlink.integrations; print('vllm' in sys.modules)"
    done = output(code)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_the_connector_without_vllm() -> None:
    """None in sys.modules is how Python says that there is no such module."""
    code = "import sys; sys.modules['vllm'] = None; from omni_kvlink.integrations.vllm "
    code += "import OmniKVLinkConnector"
    done = output(code)
    assert done.returncode != 0
    assert "UnavailableError: OmniKVLinkConnector cannot be imported" in done.stderr
    assert "pip install 'vllm==0.32.*'" in done.stderr


def test_the_plugin_without_vllm() -> None:
    """Another host of the entry point starts without the connector, and says so."""
    code = "import sys; sys.modules['vllm'] = None; from omni_kvlink.integrations.vllm "
    code += "import register; register()"
    done = output(code)
    assert done.returncode == 0
    assert "OmniKVLinkConnector is not registered with vLLM" in done.stderr
