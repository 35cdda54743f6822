"""The rules of the house, read from the source: who may import whom, and what nobody may write."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import omni_kvlink

HOUSE = Path(omni_kvlink.__file__).parent
NAME = "omni_kvlink"
FILES = sorted(HOUSE.rglob("*.py"))
MOST_LINES = 400

LAYERS = {
    "errors": 0,
    "_version": 0,
    "_faults": 0,
    "branch": 1,
    "header": 1,
    "wire": 1,
    "memory": 1,
    "arena": 1,
    "ledger": 1,
    "_native": 1,
    "_part": 1,
    "_cuda": 1,
    "tensors": 2,
    "paged": 2,
    "places": 2,
    "pools": 2,
    "metadata": 2,
    "schema": 2,
    "bundle": 2,
    "copier": 3,
    "connectors": 3,
    "adapters": 3,
    "topology": 3,
    "files": 3,
    "link": 4,
    "aio": 5,
    "lookup": 5,
    "engine": 5,
    "models": 5,
    "integrations": 5,
    "testing": 5,
    "bench": 6,
    "__init__": 7,
}
"""Each room of the package; a room's files may import one another."""

FAMILIES = {1, 2}
"""Layers whose rooms are one subject in several files and may import each other."""

MAY = {
    "errors": set[str](),
    "_version": set[str](),
    "connectors": {room for room, layer in LAYERS.items() if layer <= 1},
    "files": {room for room, layer in LAYERS.items() if layer <= 2} | {"copier"},
    "link": {room for room, layer in LAYERS.items() if layer <= 3} - {"adapters"},
    "models": {"errors", "engine"},
    "engine": {room for room, layer in LAYERS.items() if layer <= 4} | {"models"},
    "integrations": {room for room, layer in LAYERS.items() if layer <= 4},
    "bench": set(LAYERS),
}
"""Where the layers alone do not say which rooms a room may import."""

MAY_LAZILY = {"schema": {"files"}, "bundle": {"files"}, "integrations": {"engine"}}
"""Allowed inside a function only."""

OUTSIDE = {
    "branch": {"msgspec"},
    "header": {"msgspec", "crc32c"},
    "wire": {"msgspec"},
    "memory": {"numpy"},
    "arena": set[str](),
    "ledger": set[str](),
    "errors": set[str](),
    "_version": set[str](),
    "_faults": set[str](),
    "_native": {"numpy"},
    "_part": set[str](),
    "_cuda": set[str](),
    "metadata": {"msgspec"},
    "connectors": {"msgspec", "numpy", "zmq", "ucxx", "crc32c"},
    "models": {"torch", "numpy", "msgspec", "safetensors", "tokenizers", "PIL"},
}
"""Packages that a room may import; a room that is not here may import any, torch too."""

FORBIDDEN = {
    r"\b(c|cloud)?pickle\b|\bdill\b|\bshelve\b|allow_pickle=True": "pickle runs what a peer sends",
    r"\bmarshal\b": "marshal crashes on what a peer sends",
    r"\btorch\.load\b": "torch.load is pickle",
    r"(?<![.\w])(eval|exec)\(": "no text becomes code",
    r"\brecv_pyobj\b|\bsend_pyobj\b": "pickle again",
    r"tcp://\*|\b0\.0\.0\.0\b|INADDR_ANY": "nothing listens to the whole world",
    r"\btime\.time(_ns)?\b|\bfrom time import\b|CLOCK_REALTIME": "only the monotonic clock counts",
    r"\bshared_memory\b": "an attaching process unlinks the owner's segment",
}


FORBIDDEN_BUT_TO = {
    r"\bdatetime\b(?! import timedelta\n)": (
        "a date is no deadline: only the monotonic clock counts",
        {"bench"},
    ),
    r"\btime\.sleep\(": ("who waits is woken", {"_faults", "testing", "bench"}),
}
"""What some rooms may do: say when something was measured, act a slow peer."""


class Import(ast.NodeVisitor):
    """Every module that a source imports, with whether it does so inside a function."""

    def __init__(self, module: str, *, is_package: bool):
        self._package = module.split(".") if is_package else module.split(".")[:-1]
        self._depth = 0
        self.found: list[tuple[str, bool]] = []

    def visit_FunctionDef(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(alias.name, self._depth > 0) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._package[: len(self._package) - node.level + 1] if node.level else []
        source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
        for alias in node.names:
            self.found.append((f"{source}.{alias.name}", self._depth > 0))


def imports(module: str, source: str, *, is_package: bool = False) -> list[tuple[str, bool]]:
    visitor = Import(module, is_package=is_package)
    visitor.visit(ast.parse(source))
    return visitor.found


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def allowed(room: str) -> set[str]:
    layer = LAYERS[room]
    below = {other for other, at in LAYERS.items() if at < layer}
    kin = {other for other, at in LAYERS.items() if at == layer and layer in FAMILIES}
    return MAY.get(room, below | kin) | {room}


def complaints(module: str, source: str, *, is_package: bool = False) -> Iterator[str]:
    """What a file does that the house forbids."""
    room = room_of(module)
    if room not in LAYERS:
        yield f"{module}: room {room} is not in the table"
        return
    for target, lazy in imports(module, source, is_package=is_package):
        outside = target.split(".")[0]
        if outside != NAME:
            known = outside in sys.stdlib_module_names or outside in OUTSIDE.get(room, {outside})
            if not known:
                yield f"{module} imports {target}"
            continue
        there = room_of(target)
        if there not in LAYERS:  # a name that __init__ re-exports
            there = "__init__"
        extra = MAY_LAZILY.get(room, set()) if lazy else set()
        if there not in allowed(room) | extra:
            yield f"{module} (layer {LAYERS[room]}) imports {target}"
    for pattern, why in FORBIDDEN.items():
        if re.search(pattern, source):
            yield f"{module} has {pattern}: {why}"
    for pattern, (why, rooms) in FORBIDDEN_BUT_TO.items():
        if room not in rooms and re.search(pattern, source):
            yield f"{module} has {pattern}: {why}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{module}, line {node.lineno}: a bare except"
    if "torch.frombuffer" in source and room != "tensors":
        yield f"{module}: torch.frombuffer belongs in tensors.py"
    if source.count("\n") > MOST_LINES:
        yield f"{module} has {source.count(chr(10))} lines; the limit is {MOST_LINES}"


def module_name(path: Path) -> str:
    parts = path.relative_to(HOUSE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(HOUSE)) for path in FILES])
def test_a_file_keeps_the_rules(path: Path) -> None:
    source, is_package = path.read_text(), path.name == "__init__.py"
    assert list(complaints(module_name(path), source, is_package=is_package)) == []


@pytest.mark.parametrize(
    ("module", "source", "word"),
    [
        ("omni_kvlink.errors", "from . import wire", "wire"),
        ("omni_kvlink.errors", "import msgspec", "msgspec"),
        ("omni_kvlink.payload.manifest", "import torch", "torch"),
        ("omni_kvlink.payload.manifest", "from .schema import KVCacheTransferData", "schema"),
        ("omni_kvlink.memory.region", "def f():\n    import torch.nn", "torch.nn"),
        ("omni_kvlink.memory.arena", "from .tensors import tensor_view", "tensors"),
        ("omni_kvlink.memory.arena", "import numpy", "numpy"),
        ("omni_kvlink.payload.metadata", "import torch", "torch"),
        ("omni_kvlink.payload.schema", "from .files import load", "files"),
        ("omni_kvlink.payload.schema", "def f():\n    from .copier import Copier", "copier"),
        ("omni_kvlink.payload.bundle", "from .link import KVLink", "link"),
        ("omni_kvlink.payload.files", "from .connectors.base import Options", "connectors"),
        ("omni_kvlink.copier.base", "from ..adapters.base import CacheAdapter", "adapters"),
        ("omni_kvlink.adapters.bagel", "from ..copier import Copier", "copier"),
        ("omni_kvlink.adapters.bagel", "from ..models.bagel import NaiveCache", "models"),
        ("omni_kvlink.connectors.base", "import torch", "torch"),
        ("omni_kvlink.connectors.base", "from ..schema import KVCacheTransferData", "schema"),
        ("omni_kvlink.connectors.shm.listener", "from ...copier import Copier", "copier"),
        ("omni_kvlink.connectors.shm.listener", "from ... import link", "link"),
        ("omni_kvlink.connectors.inproc", "from omni_kvlink.adapters import base", "adapters"),
        ("omni_kvlink.connectors.inproc", "from omni_kvlink import KVLink", "KVLink"),
        ("omni_kvlink.link.kvlink", "from ..adapters.bagel import BagelAdapter", "adapters"),
        ("omni_kvlink.models.bagel.cache", "from omni_kvlink.payload.schema import X", "schema"),
        ("omni_kvlink.models.bagel.cache", "import transformers", "transformers"),
        ("omni_kvlink.testing.rig", "from ..bench import cli", "bench"),
        ("omni_kvlink.integrations.x", "from ..engine.engine import Engine", "engine"),
        ("omni_kvlink.cellar", "", "table"),
        ("omni_kvlink.link.kvlink", "import pickle", "pickle"),
        ("omni_kvlink.link.kvlink", "import marshal", "marshal"),
        ("omni_kvlink.link.kvlink", "x = torch.load(path)", "torch"),
        ("omni_kvlink.link.kvlink", "x = eval(text)", "eval"),
        ("omni_kvlink.link.kvlink", "exec(text)", "exec"),
        ("omni_kvlink.link.kvlink", "s.recv_pyobj()", "recv_pyobj"),
        ("omni_kvlink.link.kvlink", "s.bind('tcp://*:5555')", "tcp"),
        ("omni_kvlink.link.kvlink", "s.bind('tcp://0.0.0.0:5555')", "tcp"),
        ("omni_kvlink.link.kvlink", "s.bind(('0.0.0.0', 5555))", "whole world"),
        ("omni_kvlink.link.kvlink", "import cloudpickle", "pickle"),
        ("omni_kvlink.link.kvlink", "numpy.load(path, allow_pickle=True)", "pickle"),
        ("omni_kvlink.link.kvlink", "start = time.time()", "monotonic"),
        ("omni_kvlink.link.kvlink", "deadline = time.time_ns() + 5", "monotonic"),
        ("omni_kvlink.link.kvlink", "from time import time", "monotonic"),
        ("omni_kvlink.link.kvlink", "time.clock_gettime(time.CLOCK_REALTIME)", "monotonic"),
        ("omni_kvlink.link.kvlink", "deadline = datetime.now() + wait", "monotonic"),
        ("omni_kvlink.link.kvlink", "while not done: time.sleep(0.01)", "woken"),
        ("omni_kvlink.link.kvlink", "from multiprocessing import shared_memory", "shared_memory"),
        ("omni_kvlink.link.kvlink", "try:\n    x()\nexcept:\n    pass", "bare except"),
        ("omni_kvlink.copier.native", "torch.frombuffer(x)", "frombuffer"),
        ("omni_kvlink.link.kvlink", "\n" * 401, "401 lines"),
    ],
)
def test_a_broken_rule_is_seen(module: str, source: str, word: str) -> None:
    assert any(word in complaint for complaint in complaints(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("omni_kvlink.payload.schema", "def f():\n    from .files import load"),
        ("omni_kvlink.payload.manifest", "import json, msgspec\nfrom .branch import Branch"),
        ("omni_kvlink.connectors.shm.listener", "from ...arena import Arena\nimport socket"),
        (
            "omni_kvlink.connectors.shm.listener",
            "from ..base import X\nfrom . import channel",
        ),
        ("omni_kvlink.models.bagel.vae", "import torch\nmodel.eval()\nfrom .config import X"),
        ("omni_kvlink.integrations.x", "def f():\n    from ..engine.engine import Engine"),
        ("omni_kvlink.bench.cli", "from .. import KVLink\nfrom ..testing import check_copier"),
        ("omni_kvlink.bench.machine", "from datetime import datetime"),
        ("omni_kvlink.link.kvlink", "deadline = time.monotonic() + timeout"),
    ],
)
def test_what_is_allowed_is_not_seen(module: str, source: str) -> None:
    assert list(complaints(module, source)) == []


def home(target: str, modules: Mapping[str, Path]) -> str:
    """The file that a dotted name lives in."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target


OUTDOORS = [
    path
    for room in ("tests", "examples", "benchmarks", "csrc")
    for path in sorted((HOUSE.parent / room).rglob("*.*"))
    if path.suffix in (".py", ".sh", ".cpp", ".cu", ".h")
]


@pytest.mark.skipif(not OUTDOORS, reason="installed without the sources")
def test_no_file_is_long() -> None:
    long = {path.name: len(path.read_text().splitlines()) for path in OUTDOORS}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_no_file_imports_itself_in_a_circle() -> None:
    """Imports at the top of a file, within the package, form no ring."""
    modules = {module_name(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = imports(module, path.read_text(), is_package=path.name == "__init__.py")
        early = {home(target, modules) for target, lazy in found if not lazy}
        graph[module] = early & modules.keys() - {module, NAME}
    assert list(TopologicalSorter(graph).static_order())
