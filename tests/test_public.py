"""Importing the package has no side effect; every public name is annotated and documented."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import omni_kvlink
from omni_kvlink import KVConsumer, KVLink, KVProducer, PendingBatch, errors
from support.processes.absent import run
from support.processes.fork_server import new_interpreters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(omni_kvlink.__file__).parent

IMPORTED = """
import json, os, sys, threading
before = set(os.listdir("/proc/self/fd"))
import torch
threads = threading.active_count()
from omni_kvlink import *
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
    "omni_kvlink.telemetry.metrics",
    "omni_kvlink.adapters",
    "omni_kvlink.lookup",
    "omni_kvlink.models",
    "omni_kvlink.engine",
    "omni_kvlink.integrations",
    "omni_kvlink.testing",
    "omni_kvlink.bench",
    "prometheus_client",
    "zmq",
    "ucxx",
    "diffusers",
    "transformers",
    "tokenizers",
    "PIL",
)


def test_importing_has_no_side_effect() -> None:
    with new_interpreters():
        done = subprocess.run(
            [sys.executable, "-c", IMPORTED], cwd=ROOT.parent, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert "omni_kvlink" in found["modules"]
    later = tuple(f"{name}." for name in LATER)
    assert [name for name in found["modules"] if f"{name}.".startswith(later)] == []
    assert (found["threads"], found["descriptors"]) == (0, 0)


ALONE = """
import sys
import omni_kvlink
print(*sorted({name.split(".")[0] for name in sys.modules} & {*sys.argv[1:]}))
assert {"KVLink", "KVMetadata"} <= {*dir(omni_kvlink)}
omni_kvlink.KVLink
print(*sorted({name.split(".")[0] for name in sys.modules} & {*sys.argv[1:]}))
"""


def test_the_package_alone_imports_nothing_slow() -> None:
    command = [sys.executable, "-c", ALONE, "torch", "numpy", "msgspec", "zmq"]
    with new_interpreters():
        done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "\nmsgspec numpy torch\n")


OTHER_PLATFORM = """
import sys
sys.platform = "darwin"
try:
    import omni_kvlink
except ImportError as error:
    print(error, "torch" in sys.modules, sep="; ")
"""


def test_another_platform_is_refused_before_anything_is_imported() -> None:
    expected = "omni_kvlink needs Linux; this Python runs on 'darwin'; False\n"
    assert run(OTHER_PLATFORM, preloaded=False) == expected


# ---- what is public

NAMES = {name: getattr(omni_kvlink, name) for name in dir(omni_kvlink) if name[0] != "_"}
PUBLIC = {name: value for name, value in NAMES.items() if inspect.isclass(value)}


@pytest.mark.parametrize("name", ["__init__.py", "lowlevel.py"])
def test_every_public_name_is_a_plain_re_export(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    for node in own_imports(tree):
        assert [alias.asname for alias in node.names] == [alias.name for alias in node.names]
    assert not [node for node in tree.body if isinstance(node, (ast.Import, ast.ClassDef))]


def own_imports(tree: ast.AST) -> list[ast.ImportFrom]:
    """The imports of the package's own names, those for type checkers included."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [node for node in found if (node.module or "").split(".")[0] == "omni_kvlink"]


def test_a_type_checker_and_python_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    typed = {
        alias.name: f"{node.module}.{alias.name}"
        for node in own_imports(tree)
        for alias in node.names
    }
    lazy = {name: module for module, names in omni_kvlink._NAMES.items() for name in names}
    assert {f"omni_kvlink.{module}.{name}" for name, module in lazy.items()} <= {*typed.values()}
    assert typed.keys() - lazy.keys() == {"__version__", *(PUBLIC.keys() & vars(errors).keys())}
    assert typed.keys() - {"__version__"} == {*star_imported()}


def star_imported() -> list[str]:
    into: dict[str, Any] = {}
    exec("from omni_kvlink import *", into)
    return [name for name in into if name != "__builtins__"]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_class_is_pickled_by_its_name(name: str) -> None:
    assert pickle.loads(pickle.dumps(PUBLIC[name])) is PUBLIC[name]
    assert getattr(omni_kvlink, name) is PUBLIC[name]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_says_what_it_is(name: str) -> None:
    value = PUBLIC[name]
    assert value.__doc__, name
    assert not value.__doc__.startswith(f"{name}("), "a generated docstring says nothing"


@pytest.mark.parametrize("kind", [KVLink, KVProducer, KVConsumer])
def test_the_links_verbs_say_what_they_do(kind: type) -> None:
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function) and not name.startswith("_"):
            assert function.__doc__, name


def test_every_blocking_verb_takes_a_timeout_by_keyword() -> None:
    blocking = (
        KVLink.connect,
        KVProducer.put,
        KVProducer.allocate,
        KVProducer.stream_put,
        KVConsumer.get,
        KVConsumer.stream_get,
        KVConsumer.get_many,
        KVProducer.put_many,
        PendingBatch.wait,
    )
    for verb in blocking:
        timeout = inspect.signature(verb).parameters["timeout"]
        assert timeout.kind is inspect.Parameter.KEYWORD_ONLY, verb


def test_each_side_has_its_own_verbs() -> None:
    own = {
        KVProducer: {
            *("put", "put_many", "stream_put", "open_stream", "allocate", "withdraw", "fail"),
        },
        KVConsumer: {
            *("get", "get_many", "begin_get_many", "stream_get", "read_stream"),
            *("contains", "is_connected"),
        },
    }
    shared = {"abort", "record", "stats", "close"}
    for kind, verbs in own.items():
        assert {name for name in dir(kind) if not name.startswith("_")} == verbs | shared


def test_isinstance_of_a_link() -> None:
    with KVLink.serve("inproc://kind") as producer:
        assert isinstance(producer, KVProducer)
        assert isinstance(producer, KVLink)
        assert not isinstance(producer, KVConsumer)
        assert not hasattr(producer, "connect")


@pytest.mark.parametrize("name", sorted(omni_kvlink._REMOVED))
def test_a_removed_name_says_its_replacement(name: str) -> None:
    replacement = omni_kvlink._REMOVED[name]
    with pytest.raises(ImportError, match=f"use omni_kvlink.{replacement}"):
        getattr(omni_kvlink, name)
    found: Any = omni_kvlink
    importlib.import_module("omni_kvlink.lowlevel")
    for part in replacement.split("."):
        found = getattr(found, part)


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in omni_kvlink._ELSEWHERE.items() for name in names],
)
def test_a_name_of_another_module_says_its_import_line(module: str, name: str) -> None:
    with pytest.raises(ImportError) as caught:
        getattr(omni_kvlink, name)
    line = str(caught.value).partition(": ")[2]
    assert line == f"from omni_kvlink.{module} import {name}"
    exec(line, {})


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(omni_kvlink, "nonsense")


def test_errors_hide_no_builtin() -> None:
    names = {name for name in vars(errors) if not name.startswith("_")}
    assert not names & set(vars(builtins))


# ---- type completeness

MODULES = ["", ".lowlevel", ".errors", ".adapters", ".topology", ".aio", ".lookup", ".testing"]


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Classes and functions that users of a module see; its submodules and imports left out."""
    submodules = {info.name for info in pkgutil.iter_modules(getattr(module, "__path__", []))}
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", "").startswith("omni_kvlink")
        if not name.startswith("_") and name not in submodules and is_own:
            yield name, value


def problems(name: str, value: Any) -> Iterator[str]:
    """What is not annotated or not documented of a class or function."""
    if not inspect.getdoc(value):
        yield f"{name} has no docstring"
    if inspect.isclass(value):
        for member, function in vars(value).items():
            if isinstance(function, property):
                function = function.fget
            function = getattr(function, "__func__", getattr(function, "func", function))
            if not inspect.isfunction(function) or "<string>" in function.__code__.co_filename:
                continue  # of a dataclass
            if member == "__init__":
                yield from unannotated(f"{name}.{member}", function)
            elif not member.startswith("_"):
                yield from unannotated(f"{name}.{member}", function)
                if not inspect.getdoc(getattr(value, member)):  # its own, or a base's
                    yield f"{name}.{member} has no docstring"
    elif inspect.isfunction(value):
        yield from unannotated(name, value)


def unannotated(name: str, function: Any) -> Iterator[str]:
    hints = function.__annotations__
    parameters = list(inspect.signature(function).parameters)
    if "return" not in hints and not name.endswith("__init__"):
        yield f"{name} has no return annotation"
    for parameter in parameters:
        if parameter not in hints and parameter not in ("self", "cls"):
            yield f"{name}: parameter {parameter} has no annotation"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_class_has_a_repr(name: str) -> None:
    module = importlib.import_module(f"omni_kvlink{name}")
    never_made = {"KVLink", "AsyncKVLink"}
    classes = [value for _, value in public_names(module) if inspect.isclass(value)]
    bare = {each.__name__ for each in classes if each.__repr__ is object.__repr__} - never_made
    assert not bare


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_annotated_and_documented(name: str) -> None:
    module = importlib.import_module(f"omni_kvlink{name}")
    assert module.__doc__
    found = [text for each, value in public_names(module) for text in problems(each, value)]
    assert not found, "\n".join(found)


def test_an_incomplete_name_is_seen() -> None:
    def incomplete(a, b: int = 0):  # type: ignore[no-untyped-def]
        pass

    assert list(problems("f", incomplete)) == [
        "f has no docstring",
        "f has no return annotation",
        "f: parameter a has no annotation",
    ]
