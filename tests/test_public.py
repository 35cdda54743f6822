"""What importing the package does, which is nothing, and what its public names say."""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import omni_kvlink
from omni_kvlink import errors

HOUSE = Path(omni_kvlink.__file__).parent

IMPORTED = """
import json, os, sys, threading
before = set(os.listdir("/proc/self/fd"))
import torch
threads = threading.active_count()
import omni_kvlink
print(json.dumps({
    "modules": sorted(sys.modules),
    "threads": threading.active_count() - threads,
    "descriptors": len(set(os.listdir("/proc/self/fd")) - before),
}))
"""
LATER = (
    "omni_kvlink.connectors.shm",
    "omni_kvlink.connectors.inproc",
    "omni_kvlink.connectors.zmq",
    "omni_kvlink.connectors.ucx",
    "omni_kvlink.adapters",
    "omni_kvlink.lookup",
    "omni_kvlink.models",
    "omni_kvlink.engine",
    "omni_kvlink.integrations",
    "omni_kvlink.testing",
    "omni_kvlink.bench",
    "zmq",
    "ucxx",
    "diffusers",
    "transformers",
    "tokenizers",
    "PIL",
)


def test_importing_has_no_side_effect() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        cwd=HOUSE.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert "omni_kvlink" in found["modules"]
    later = tuple(f"{name}." for name in LATER)
    assert [name for name in found["modules"] if f"{name}.".startswith(later)] == []
    assert (found["threads"], found["descriptors"]) == (0, 0)


# ---- what is public

PUBLIC = {name: value for name, value in vars(omni_kvlink).items() if inspect.isclass(value)}


def test_every_public_name_is_a_plain_re_export() -> None:
    tree = ast.parse((HOUSE / "__init__.py").read_text())
    for node in tree.body[1:]:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        assert node.level == 1
        assert [alias.asname for alias in node.names] == [alias.name for alias in node.names]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_says_what_it_is(name: str) -> None:
    value = PUBLIC[name]
    assert value.__doc__, name
    assert not value.__doc__.startswith(f"{name}("), "a generated docstring says nothing"


def test_the_links_verbs_say_what_they_do() -> None:
    for name, value in vars(omni_kvlink.KVLink).items():
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function) and not name.startswith("_"):
            assert function.__doc__, name


def test_every_blocking_verb_takes_a_timeout_by_keyword() -> None:
    for verb in (omni_kvlink.KVLink.get, omni_kvlink.KVLink.put, omni_kvlink.KVLink.connect):
        timeout = inspect.signature(verb).parameters["timeout"]
        assert timeout.kind is inspect.Parameter.KEYWORD_ONLY, verb


def test_errors_hide_no_builtin() -> None:
    names = {name for name in vars(errors) if not name.startswith("_")}
    assert not names & set(vars(builtins))
