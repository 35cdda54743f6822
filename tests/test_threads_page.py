"""docs/threads.md names every thread, every lock and every loop of the package, and no other."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import omni_kvlink
from omni_kvlink import KVLink, TensorTransferData
from omni_kvlink.testing.caches import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(omni_kvlink.__file__).parent
PAGE = PACKAGE.parent / "docs" / "threads.md"
with_page = pytest.mark.skipif(not PAGE.exists(), reason="installed without the sources")

OUTSIDE = {"engine", "models", "bench", "doctor", "testing"}
"""Folders of which the page says nothing."""
NAMELESS = {"start_detached", "uninterrupted"}
"""Calls that start a thread without a name."""
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "allocate_lock"}
HANDOVERS = {"call", "_call", "defer", "watch", "EventLoop"}
"""Calls whose arguments run in a loop's thread: of `EventLoop`, and `UcxTransport._call`."""
SUFFIX = "_in_loop"
DEFINITION = r"def (\w+_in_loop)\b"
OTHER_STARTS = {"Timer", "start_new_thread", "Process", "Pool", "to_thread", "run_in_executor"}
"""Calls that start a thread or a process otherwise; the package has none."""
OTHER_NAMES = "dev null tests link test_interrupts test_real_signals py"
"""Names of the page beside those of the package's code."""

OTHER_USES = {
    ("ControlConsumer._make_pool", "_close_if_unused_in_loop"): "ReceivePool calls it in the loop",
    ("UcxConsumer._make_pool", "_close_if_unused_in_loop"): "ReceivePool calls it in the loop",
    ("ControlListener._bind", "_on_parts_in_loop"): "the socket is drained in the loop",
    ("ControlListener._bind", "_on_event_in_loop"): "the socket is drained in the loop",
    ("ControlListener._bind", "_on_idle_in_loop"): "the socket is drained in the loop",
    ("ControlListener.borrow", "_on_sent_in_loop"): "PooledProducer.lend_piece hands it over",
    ("ControlListener.close", "_flush_in_loop"): "the contract of Listener: called in the loop",
    ("ShmListener.close", "_disconnect_in_loop"): "the contract of Listener: called in the loop",
    ("ShmListener.close", "_reap_in_loop"): "the contract of Listener: called in the loop",
    ("ShmListener.pass_arena", "_pass_ahead_in_loop"): "the contract of Listener",
    ("ControlConsumer._interrupt", "set_ready_in_loop"): "the caller is the loop, or hands it over",
    ("ControlSession._post_release", "_on_release_in_loop"): "handed over two lines below",
    ("ShmSession.close", "_close_in_loop"): "the caller is the loop's thread, or hands it over",
}
"""The function that uses a method of a loop otherwise, the method, and why that is right."""


class Use(NamedTuple):
    """A name or a call in a module, and the classes and functions around it."""

    file: str
    scope: tuple[str, ...]
    node: ast.AST
    is_in_function: bool = False
    is_handed_over: bool = False
    """Whether it is in an argument of a call of `HANDOVERS`."""
    target: str = ""
    """The attribute or global that it is assigned to."""

    @property
    def function(self) -> str:
        """The function around it as the page writes it, or the class whose `__init__` that is."""
        is_method = bool(self.scope) and _is_class(self.scope[0])
        return ".".join(self.scope[: 2 if is_method else 1]).removesuffix(".__init__")


def _is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name; "" of another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def uses(file: str, source: str) -> Iterator[Use]:
    """Every name and every call of a module but those in annotations."""
    tree = ast.parse(source)
    yield from _uses(tree, Use(file, (), tree), frozenset())


def _uses(node: ast.AST, around: Use, shared: frozenset[str]) -> Iterator[Use]:
    """The uses below a node; `shared`: names that the function around it declares as global."""
    if isinstance(node, (ast.Attribute, ast.Name, ast.Call)):
        yield around._replace(node=node)
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        declared = (each.names for each in ast.walk(node) if isinstance(each, ast.Global))
        shared = frozenset(name for names in declared for name in names)
        is_function = not isinstance(node, ast.ClassDef)
        around = Use(around.file, (*around.scope, node.name), node, is_function)
    inner = around
    if isinstance(node, ast.Call) and name_of(node.func) in HANDOVERS:
        inner = around._replace(is_handed_over=True)
    if isinstance(node, ast.Assign) and node.value is not None:
        for target, value in _pairs(node.targets[0], node.value):
            is_kept = isinstance(target, ast.Attribute) or not around.is_in_function
            kept = name_of(target) if is_kept or name_of(target) in shared else ""
            yield from _uses(value, around._replace(target=kept), shared)
        children: list[ast.AST] = [*node.targets]
    elif isinstance(node, ast.AnnAssign):
        is_kept = isinstance(node.target, ast.Attribute) or not around.is_in_function
        inner = around._replace(target=name_of(node.target) if is_kept else "")
        children = [] if node.value is None else [node.value]
    elif isinstance(node, ast.arg):
        children = []
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        children = [*node.decorator_list, node.args, *node.body]
    elif isinstance(node, ast.Call):
        yield from _uses(node.func, around, shared)
        children = [*node.args, *node.keywords]
    else:
        children = [*ast.iter_child_nodes(node)]
    for child in children:
        yield from _uses(child, inner, shared)


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return [*zip(target.elts, value.elts, strict=True)]
    return [(target, value)]


SOURCES = {
    str(path.relative_to(PACKAGE)): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in OUTSIDE
}
USES = [use for file, source in SOURCES.items() for use in uses(file, source)]


def threads(found: list[Use]) -> dict[str, set[str]]:
    """The names of threads, and the functions that start them; without a name, what they run."""
    started: defaultdict[str, set[str]] = defaultdict(set)
    for use in found:
        if not isinstance(use.node, ast.Call) or use.function in {"EventLoop", *NAMELESS}:
            continue
        kind, call = name_of(use.node.func), use.node
        keywords = {each.arg: each.value for each in call.keywords}
        if kind in NAMELESS:
            started[kind].add(use.function)
        elif kind == "Thread":
            started[_text(keywords.get("name", keywords["target"]))].add(use.function)
        elif kind == "EventLoop":
            started[_text(call.args[0])].add(use.function)
        elif kind == "ThreadPoolExecutor":
            started[_text(call.args[1])].add(use.function)
        elif kind in OTHER_STARTS:
            started[kind].add(use.function)
    return dict(started)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return ast.unparse(node)[2:-1]
    return str(node.value) if isinstance(node, ast.Constant) else name_of(node)


def locks(found: list[Use]) -> dict[str, str]:
    """The kind of each lock: by attribute or global, or by the function whose variable it is."""
    made = {}
    for use in found:
        kind = name_of(use.node)
        if kind not in LOCKS:
            continue
        is_of_class = bool(use.scope) and _is_class(use.scope[0])
        owner = use.scope[0] if is_of_class else Path(use.file).stem
        name = f"{owner}.{use.target}" if use.target else use.function
        made[name if "." in name else f"{owner}.{name}"] = kind
    return made


def other_uses(found: list[Use]) -> dict[tuple[str, str], str]:
    """Uses of a loop's methods outside these methods that hand them over to no loop."""
    return {
        (use.function, name): use.file
        for use in found
        if (name := name_of(use.node)).endswith(SUFFIX)
        and not use.is_handed_over
        and not any(part.endswith(SUFFIX) for part in use.scope)
    }


def loop_classes() -> set[str]:
    """The classes that have methods for a loop's thread alone."""
    return {
        node.name
        for source in SOURCES.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(each, ast.FunctionDef) and is_of_loop(each) for each in node.body)
    }


def is_of_loop(function: ast.FunctionDef) -> bool:
    return function.name.endswith(SUFFIX)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the page."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    text = next(each for each in sections if each.startswith(f"{heading}\n"))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@with_page
def test_the_page_lists_every_thread_and_who_starts_it() -> None:
    listed: defaultdict[str, set[str]] = defaultdict(set)
    for names, started_by, _, _ in rows("Threads of the library"):
        for name in code(names):
            assert name not in listed
            listed[name] = set(code(started_by))
    assert listed == threads(USES)


@with_page
def test_the_page_lists_every_lock_and_its_kind() -> None:
    listed = {name: row[1] for row in rows("Locks") for name in code(row[0])}
    assert listed == locks(USES)
    assert len(listed) == sum(len(code(row[0])) for row in rows("Locks"))


@with_page
def test_the_levels_of_locks_ascend() -> None:
    levels = [int(row[3]) for row in rows("Locks") if row[3]]
    assert levels == sorted(levels)
    assert set(levels) == set(range(6))


class RecordedLock:
    """A lock that records which locks its thread holds when it is taken."""

    def __init__(self, lock: Any, name: str, orders: set[tuple[str, str]]):
        self.lock, self.name, self.orders = lock, name, orders

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        is_taken: bool = self.lock.acquire(*args, **kwargs)
        if is_taken:
            self.record()
        return is_taken

    def release(self) -> None:
        self.lock.release()
        HELD.locks.remove(self)

    def locked(self) -> bool:
        return bool(self.lock.locked())

    def record(self) -> None:
        held = vars(HELD).setdefault("locks", [])
        if self not in held:
            self.orders |= {(other.name, self.name) for other in held}
        held.append(self)

    def __enter__(self) -> None:
        self.lock.__enter__()
        self.record()

    def __exit__(self, *exception: object) -> None:
        self.lock.__exit__(*exception)
        HELD.locks.remove(self)


HELD = threading.local()


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Names of two locks that a thread held at once, in this order; of locks made from now on."""
    found: set[tuple[str, str]] = set()
    lines = {
        (use.file, use.node.lineno): name
        for use in USES
        if isinstance(use.node, ast.Attribute)
        for name in locks([use])
    }
    listed = {name for row in rows("Locks") if row[3] for name in code(row[0])}
    for kind in ("Lock", "RLock"):
        original = getattr(threading, kind)

        def make(original: Any = original) -> Any:
            frame = sys._getframe(1)
            line = frame.f_code.co_filename.removeprefix(f"{PACKAGE}/"), frame.f_lineno
            name = lines.get(line, "")
            return RecordedLock(original(), name, found) if name in listed else original()

        monkeypatch.setattr(threading, kind, make)
    return found


@with_page
@pytest.mark.parametrize("url", ["inproc://order", "shm://order", "zmq+ipc://{}/order.sock"])
def test_locks_are_taken_in_the_order_of_the_page(
    url: str, sockets: str, orders: set[tuple[str, str]]
) -> None:
    hidden, large = torch.zeros(10), torch.zeros(100_000)
    cache: Any = Recipe("layers", layers=2).make()
    with (
        KVLink.serve(url.format(sockets), directory=sockets) as producer,
        KVLink.connect(url.format(sockets), timeout=60, directory=sockets) as consumer,
    ):
        for key, tensor in (("small", hidden), ("large", large)):
            get = threading.Thread(target=lambda key=key: consumer.get(key, timeout=60).release())
            get.start()
            producer.put(TensorTransferData(key, {"x": tensor})).wait(timeout=60)
            get.join()
        producer.put_many([TensorTransferData(key, {"x": large}) for key in "ab"])
        consumer.get_many([*"ab"], timeout=60).release()
        with producer.stream_put(cache) as out, consumer.stream_get("layers", timeout=60) as layers:
            for layer, pair in enumerate(zip(*cache.layer_blocks.values(), strict=True)):
                out.write_layer(layer, *pair)
                layers.wait_for_layer(layer)
        with producer.open_stream("growing", {"x": torch.zeros(0, 4)}) as growing:
            chunks = consumer.read_stream("growing", timeout=60)
            growing.append({"x": torch.zeros(2, 4)})
            assert chunks.receive() is not None
        assert chunks.receive() is None
        producer.fail("other", "a test")
        consumer.abort("other")
    levels = {name: int(row[3]) for row in rows("Locks") if row[3] for name in code(row[0])}
    assert ("PooledProducer.lock", "ArenaPool._lock") in orders
    wrong = {(first, second) for first, second in orders if levels[first] >= levels[second]}
    assert wrong == set()


@with_page
def test_the_page_lists_every_class_with_methods_of_a_loop() -> None:
    table = rows("Methods of a loop")
    assert {name for classes, _ in table for name in code(classes)} == loop_classes()
    assert {name for _, loop in table for name in code(loop)} <= threads(USES).keys()


def test_methods_of_a_loop_are_used_there() -> None:
    assert other_uses(USES).keys() == OTHER_USES.keys()


def test_every_method_of_a_loop_is_used() -> None:
    defined = {name for source in SOURCES.values() for name in re.findall(DEFINITION, source)}
    assert defined
    assert defined == {name for use in USES if (name := name_of(use.node)).endswith(SUFFIX)}


@with_page
def test_what_else_the_page_names_exists() -> None:
    page = re.sub(r"^```.*?^```", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = {word for cell in code(page) for word in re.findall(r"[A-Za-z_]\w+", cell)}
    text = " ".join([*SOURCES, *SOURCES.values(), OTHER_NAMES])
    assert named - set(re.findall(r"[A-Za-z_]\w+", text)) == set()


@pytest.mark.parametrize(
    ("source", "thread", "lock"),
    [
        ("def f():\n    threading.Thread(target=g, name='a').start()", {"a": {"f"}}, {}),
        ("class A:\n    def f(self):\n        Thread(target=self.g)", {"g": {"A.f"}}, {}),
        ("class A:\n    def __init__(self):\n        self.x = EventLoop('a')", {"a": {"A"}}, {}),
        ("def f():\n    threading.Timer(1, g)", {"Timer": {"f"}}, {}),
        ("lock = threading.Lock()", {}, {"m.lock": "Lock"}),
        ("def f():\n    global a\n    a = RLock()", {}, {"m.a": "RLock"}),
        ("def f():\n    a = RLock()", {}, {"m.f": "RLock"}),
        ("class A:\n    a: Lock = field(default_factory=Lock)", {}, {"A.a": "Lock"}),
        (
            "class A:\n    def f(self, x: threading.Lock) -> Lock:\n        self.a, b = Lock(), 1",
            {},
            {"A.a": "Lock"},
        ),
        ("class A:\n    def f(self):\n        g(threading.Condition())", {}, {"A.f": "Condition"}),
    ],
)
def test_a_thread_or_lock_is_found(
    source: str, thread: dict[str, set[str]], lock: dict[str, str]
) -> None:
    found = [*uses("folder/m.py", source)]
    assert (threads(found), locks(found)) == (thread, lock)


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("self._x_in_loop()", True),
        ("self.later(self._x_in_loop)", True),
        ("self._loop.call(self._x_in_loop)", False),
        ("self._loop.call(partial(self._x_in_loop, 1))", False),
        ("self._call(lambda: self._x_in_loop())", False),
        ("self._loop.call(f); self._x_in_loop()", True),
    ],
)
def test_another_use_of_a_loops_method_is_found(line: str, is_found: bool) -> None:
    source = "class A:\n    def {}(self):\n        {}"
    found = other_uses([*uses("m.py", source.format("f", line))])
    assert found == ({("A.f", "_x_in_loop"): "m.py"} if is_found else {})
    assert not other_uses([*uses("m.py", source.format("f_in_loop", line))])
