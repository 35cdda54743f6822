"""LMCache's own bench, by the command of the guide, beside its own adapter for files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.doc_blocks import blocks
from support.processes.fork_server import new_interpreters

pytest.importorskip("lmcache.v1.distributed", reason="make test-lmcache installs LMCache")

LMCACHE = Path(sys.executable).with_name("lmcache")
PAGE = "docs/guides/lmcache.md"


def bench(spec: dict[str, Any], *arguments: str) -> str:
    """Run the bench; what it printed."""
    command = [LMCACHE, "bench", "l2", "--no-skip-verify", *arguments]
    with new_interpreters():
        done = subprocess.run(
            [*map(str, command), "--l2-adapter", json.dumps(spec)],
            env={**os.environ, "LMCACHE_DISABLE_BANNER": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def documented(command: str) -> dict[str, Any]:
    """The adapter of one of the guide's commands."""
    for block in blocks(PAGE):
        argv = shlex.split(block.text) if command in block.text else []
        if argv:
            found: dict[str, Any] = json.loads(argv[argv.index("--l2-adapter") + 1])
            return found
    raise AssertionError(f"no {command} in {PAGE}")


def test_lmcache_takes_the_configurations_of_the_guide() -> None:
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

    from omni_kvlink.integrations.lmcache import KVLinkL2AdapterConfig

    for command in ("lmcache server", "lmcache bench"):
        spec = documented(command)
        assert spec.pop("type") == "plugin"
        config = PluginL2AdapterConfig.from_dict(spec)
        assert KVLinkL2AdapterConfig.from_dict(config.adapter_params).settings.revision


def test_every_key_is_verified(sockets: str) -> None:
    """Several submits at once; half of the lookups are misses."""
    spec = documented("lmcache bench")
    spec["adapter_params"]["options"] = {"directory": sockets}
    given = "--num-keys 16 --in-flight 3 --rounds 3 --lookup-max-hit-rate 0.5"
    printed = bench(spec, *given.split())
    assert "All 48 keys data verified OK" in printed
    totals = [int(number) for number in re.findall(r"Total success: +([0-9]+)", printed)]
    assert totals == [144, 72, 144], printed  # stored, found, loaded
