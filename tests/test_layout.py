"""The package keeps its layout and its vocabulary, and each rule of `layout.py` can fail."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import layout
import pytest
from layout import Module

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not (layout.ROOT / "README.md").exists(), reason="installed without the sources"
)
KNOWN = {module.name: module for module in layout.modules()}


@pytest.mark.parametrize("rule", layout.RULES)
def test_the_package_keeps(rule: str) -> None:
    assert layout.RULES[rule]() == []


@pytest.mark.parametrize(
    ("path", "source", "word"),
    [
        ("errors", "from omni_kvlink.payload import manifest", "manifest"),
        ("errors", "import msgspec", "msgspec"),
        ("memory.region", "def f():\n    import torch.nn", "torch.nn"),
        ("memory.arena", "from omni_kvlink.payload.views import tensor_view", "views"),
        ("memory.arena", "from ..payload.views import tensor_view", "views"),
        ("payload.schema", "def f():\n    from omni_kvlink.copier import Copier", "copier"),
        ("payload.bundle", "from omni_kvlink.link import KVLink", "link"),
        ("copier.base", "from omni_kvlink.adapters.base import CacheAdapter", "adapters"),
        ("adapters.bagel", "from omni_kvlink.topology import Topology", "topology"),
        ("adapters.bagel", "from omni_kvlink.models.bagel import NaiveCache", "models"),
        ("connectors.base", "import torch", "torch"),
        ("connectors.base", "from omni_kvlink.payload.schema import X", "schema"),
        ("connectors.protocol.messages", "from omni_kvlink.connectors.base import X", "base"),
        ("connectors.runtime.producer", "from omni_kvlink.connectors.shm import X", "shm"),
        ("connectors.control.keys", "from omni_kvlink.connectors import zmq", "zmq"),
        ("connectors.ucx.listener", "from omni_kvlink.connectors.zmq import BACKEND", "zmq"),
        ("connectors.inproc", "from omni_kvlink import KVLink", "KVLink"),
        ("link.producer", "from omni_kvlink.adapters.bagel import BagelAdapter", "adapters"),
        ("models.bagel.cache", "from omni_kvlink.engine.request import X", "engine"),
        ("models.bagel.cache", "import transformers", "transformers"),
        ("engine.kv.kv_manager", "from omni_kvlink.connectors.base import X", "connectors"),
        ("engine.kv.kv_manager", "from omni_kvlink.engine.core.engine_core import X", "core"),
        ("engine.sched.x", "def f():\n    from omni_kvlink.engine.ray import X", "ray"),
        ("integrations.vllm.x", "from omni_kvlink.engine import OmniDiffusion", "engine"),
        ("integrations.vllm.x", "from omni_kvlink.integrations.vllm_omni import X", "vllm_omni"),
        ("testing.x", "from omni_kvlink.bench import cli", "bench"),
        ("cellar", "", "LAYERS"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str, word: str) -> None:
    module = Module(f"{layout.NAME}.{path}", source)
    assert any(word in error for error in layout.import_errors(module, KNOWN))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("payload.manifest", "import json, msgspec\nfrom omni_kvlink.errors import WireError"),
        ("connectors.shm.x", "from omni_kvlink.memory.arena import Arena\nimport socket"),
        ("connectors.zmq.x", "from omni_kvlink.connectors.control.keys import X"),
        ("models.bagel.vae", "import torch\nfrom omni_kvlink.models.bagel.config import X"),
        ("engine.core.x", "from omni_kvlink import KVLink\nfrom omni_kvlink.lowlevel import X"),
        ("bench.cli", "from omni_kvlink import KVLink\nfrom omni_kvlink.testing import X"),
    ],
)
def test_a_right_import_passes(path: str, source: str) -> None:
    assert list(layout.import_errors(Module(f"{layout.NAME}.{path}", source), KNOWN)) == []


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import pickle", "pickle"),
        ("import cloudpickle", "pickle"),
        ("numpy.load(path, allow_pickle=True)", "pickle"),
        ("import marshal", "marshal"),
        ("x = torch.load(path)", "torch"),
        ("x = eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("s.recv_pyobj()", "recv_pyobj"),
        ("s.bind('tcp://*:5555')", "tcp"),
        ("s.bind('tcp://0.0.0.0:5555')", "tcp"),
        ("s.bind(('0.0.0.0', 5555))", "interface"),
        ("start = time.time()", "monotonic"),
        ("deadline = time.time_ns() + 5", "monotonic"),
        ("from time import time", "monotonic"),
        ("time.clock_gettime(time.CLOCK_REALTIME)", "monotonic"),
        ("deadline = datetime.now() + wait", "deadline"),
        ("while not done: time.sleep(0.01)", "poll"),
        ("from multiprocessing import shared_memory", "shared_memory"),
        ("try:\n    x()\nexcept:\n    pass", "bare except"),
        ("torch.frombuffer(x)", "frombuffer"),
        ("@functools.cached_property\ndef x(self): ...", "lock"),
    ],
)
def test_a_forbidden_call_is_found(source: str, word: str) -> None:
    module = Module(f"{layout.NAME}.link.producer", source)
    assert any(word in error for error in layout.source_errors(module))


def test_a_call_is_allowed_where_it_belongs() -> None:
    allowed = [
        Module("omni_kvlink.bench.machine", "from datetime import datetime"),
        Module("omni_kvlink.link.producer", "deadline = time.monotonic() + timeout"),
        Module("omni_kvlink.models.bagel.vae", "model.eval()"),
    ]
    assert [error for module in allowed for error in layout.source_errors(module)] == []


@pytest.mark.parametrize(
    "back",
    [
        "from omni_kvlink.x import X",
        "def f():\n    from omni_kvlink.x import X",
        "if TYPE_CHECKING:\n    from omni_kvlink.x import X",
    ],
)
def test_a_cycle_is_found(back: str) -> None:
    files = [Module("omni_kvlink.x", "import omni_kvlink.y"), Module("omni_kvlink.y", back)]
    assert any("omni_kvlink.x" in error for error in layout.cycle_errors(files))


@pytest.mark.parametrize(
    ("body", "is_wrong"),
    [
        ("for x in y:\n  z = x\nreturn x", True),
        ("for x in y:\n  z = x\nreturn z", True),
        ("async for x in y:\n  pass\nif y:\n  return x", True),
        ("for x in y:\n  for z in x:\n    pass\n  print(z)", True),
        ("z = None\nfor x in y:\n  z = x\nreturn z", False),
        ("for x in y:\n  y = x\nreturn y", False),
        ("for x in y:\n  break\nelse:\n  return None\nreturn x", False),
        ("for x in y:\n  print(x)\nreturn [x for x in y]", False),
        ("for x in y:\n  print(x)\nfor x in y:\n  print(x)", False),
    ],
)
def test_a_loop_variable_after_its_loop_is_found(body: str, is_wrong: bool) -> None:
    source = "async def f(y):\n" + textwrap.indent(body, "  ")
    assert bool(list(layout.loop_errors(Module("omni_kvlink.x", source)))) is is_wrong


def test_a_crowded_folder_is_found() -> None:
    files = [Module(f"omni_kvlink.engine.m{number}", "") for number in range(9)]
    assert any("engine has 9" in error for error in layout.count_errors(files))


def test_a_class_that_is_defined_twice_is_found() -> None:
    files = [Module(f"omni_kvlink.{name}", "class Link:\n    pass") for name in "xy"]
    assert any("omni_kvlink.y" in error for error in layout.class_errors(files))


@pytest.mark.parametrize(
    "source", ["door = 1", "x._door()", "def f(*, way): ...", "class Door: ..."]
)
def test_a_retired_name_is_found(source: str) -> None:
    assert list(layout.retired_in_python(source))


def test_retired_words_in_prose_are_allowed(tmp_path: Path) -> None:
    assert list(layout.retired_in_python("# the way\nx = 'a door'\nindoors = doorstep")) == []
    page = "The way it works.\n\n`door` is old.\n\n```python\nlink.say(x)\n```\n"
    assert [word for word, _ in layout.retired_in_text(page)] == ["door", "say"]


def test_a_shared_module_among_the_tests_is_found(tmp_path: Path) -> None:
    for name in ("support/peers.py", "link/test_link.py", "link/peers.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).touch()
    assert list(layout.support_errors(tmp_path)) == ["tests/link/peers.py belongs in tests/support"]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x = link._end", 1),
        ("link._end._session = 1", 2),
        ("monkeypatch.setattr(link, '_end', 1)", 1),
        ("x = getattr(link, '_end', None)", 1),
        ("x = link._end  # type: ignore[attr-defined]", 1),
        ("x = link._end  # it has no public name", 0),
        ("x = link._end  # type: ignore[attr-defined]  # it has no public name", 0),
        ("# it has no public name\nx = link._end", 0),
        ("# it has no public name\n\nx = link._end", 1),
        ("# Reaches into _end: it is private\n\nx = link._end", 0),
        ("# Reaches into _end,\n# _loop: it is\n# private\n\nx = link._end._loop", 0),
        ("# Reaches into _end:\n# it is private\n\nx = link._end", 0),
        ("# Reaches into _end:\n\nx = link._end", 1),
        ("# Reaches into _end: it is private\n\nx = link._end._loop", 1),
        ("# Reaches into _end, _loop: they are private\n\nx = link._end", 1),
        ("# Reaches into _end: it is private\n\nx = self._end", 1),
        ("class A:\n    # Reaches into _end: it is private\n\n    x = link._end", 1),
        ("class A:\n    def f(self):\n        return self._end", 0),
        ("class A(B):\n    def f(self):\n        return super()._end()", 0),
        ("import os\nos._exit(0)", 0),
        ("x = link.__dict__, pair._replace(a=1)", 0),
    ],
)
def test_a_private_attribute_without_a_reason_is_found(
    source: str, count: int, tmp_path: Path
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(source)
    assert len(list(layout.private_errors(tmp_path))) == count


def test_names_that_say_nothing_are_found() -> None:
    files = [Module("omni_kvlink.x", "def f(one):\n    found = self.left = one\n    lease = found")]
    assert "found" in next(layout._names_of_files(files))
    assert not list(layout._names_of_files([Module("omni_kvlink.x", "def f(lease): ...")]))


@pytest.mark.parametrize(
    ("docstring", "count"), [("What it is.", 1), ("Those of it.", 1), ("Return it.", 0)]
)
def test_a_docstring_that_begins_as_a_fragment_is_found(docstring: str, count: int) -> None:
    source = f'def f():\n    """{docstring}"""\n\nX = 1\n"""{docstring}"""'
    found = list(layout._docstrings_of_files([Module("omni_kvlink.x", source)]))
    assert len(found) == 2 * count
