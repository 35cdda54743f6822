"""Without LMCache: importing costs nothing, using the adapter says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.processes.fork_server import new_interpreters


@pytest.mark.parametrize(
    ("host", "name", "command"),
    [
        ("lmcache", "KVLinkL2Adapter", "pip install lmcache==0.5.6"),
        ("sglang", "KVLinkHiCache", "pip install sglang==0.5.23"),
    ],
)
def test_the_adapter_without_its_host(host: str, name: str, command: str) -> None:
    """None in sys.modules is how Python says that there is no such module."""
    code = f"import sys; sys.modules[{host!r}] = None; import omni_kvlink.integrations.{host} as it"
    for statement, status in ((code, 0), (f"{code}; it.{name}", 1)):
        with new_interpreters():
            done = subprocess.run(
                [sys.executable, "-c", statement],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        assert done.returncode == status, done.stderr
    assert "UnavailableError: " in done.stderr
    assert command in done.stderr
