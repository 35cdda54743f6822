"""Checks of the package's layout and vocabulary, read from the source; `python tests/layout.py`.

The script prints each rule with its result and exits 1 if one is broken. `test_layout.py` runs the
same rules, and shows that each of them can fail.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vocabulary import MOST_EMPTY_NAMES, bound_names, fragments, is_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

ROOT = Path(__file__).resolve().parents[1]
NAME = "omni_kvlink"

LAYERS = (
    "errors _version",
    "settings",
    "system",
    "telemetry.observers",
    "telemetry.record_queue",
    "telemetry.timeline",
    "memory",
    "_native",
    "payload",
    "copier",
    "adapters topology",
    "connectors.protocol",
    "connectors.base",
    "connectors.runtime",
    "connectors.control",
    "connectors.inproc connectors.shm connectors.zmq connectors.ucx",
    "connectors.auto",
    "connectors.registry connectors",
    "link",
    "__init__",
    "lowlevel",
    "telemetry",
    "aio kept lookup models",
    "engine.lora.request",
    "engine.tokens",
    "engine.inputs",
    "engine.errors engine.sampling engine.config",
    "engine.lora",
    "engine.request",
    "engine.outputs",
    "engine.ipc",
    "engine.parallel",
    "engine.kv engine.step_cache",
    "engine.sched",
    "engine.worker",
    "engine.executor",
    "engine.core",
    "engine.stage",
    "engine.ray",
    "engine.models",
    "engine.entrypoints",
    "engine",
    "integrations.store_settings",
    "integrations.lmcache integrations.ray integrations.sglang "
    "integrations.vllm integrations.vllm_omni",
    "integrations",
    "testing",
    "inspection",
    "cli.arguments cli.process",
    "cli.terminal",
    "bench",
    "doctor",
    "cli",
)
"""The folders and modules of the package, lowest first. A file imports from its own entry and from
lines above, never from a neighbour on its line; imports inside functions count."""

PUBLIC = {"", "errors", "settings", "lowlevel", "adapters", "topology", "aio", "kept", "lookup"}
"""What the engine and the integrations may import of the library; `""` is `omni_kvlink` itself."""

ONLY = {
    "connectors": {
        "errors",
        "system",
        "settings",
        "_version",
        "telemetry.observers",
        "memory",
        "_native",
        "payload.digests",
        "payload.format",
        "payload.layout_cache",
        "payload.manifest",
        "connectors",
    },
    "link": {
        "errors",
        "system",
        "settings",
        "telemetry.observers",
        "telemetry.timeline",
        "memory",
        "payload",
        "copier",
        "connectors",
        "link",
    },
    "models": {"errors", "models"},
    "engine": PUBLIC | {"models", "engine"},
    "integrations": PUBLIC | {"integrations"},
}
"""Where the order alone allows more than it should."""

THIRD_PARTY = {
    "errors": set[str](),
    "system": set[str](),
    "settings": set[str](),
    "_version": set[str](),
    "memory": {"numpy"},
    "_native": {"numpy", "google_crc32c"},
    "connectors": {"msgspec", "numpy", "zmq", "ucxx", "cryptography"},
    "models": {"torch", "numpy", "msgspec", "safetensors", "tokenizers", "PIL"},
}
"""Packages that a folder may import; one that is not here may import any."""

MOST_MODULES = {"": 5, "engine": 8, "connectors": 6}
"""Python files that may lie directly in a folder of the package."""

OWN = {"self", "cls", "super()"}
"""Whose private attributes a class may name in itself."""

EXPLAINED = r"^# Reaches into ((?:\w+,(?: |\n# ))*\w+):(?: |\n# )\S"
"""A comment at the head of a test file: the private names that it uses, and why."""

DIRECTIVE = r"# (noqa|type:)[^#]*"
"""A comment for a tool, which is no reason."""

FORBIDDEN = {
    r"\b(c|cloud)?pickle\b|\bdill\b|\bshelve\b|allow_pickle=True": "pickle runs what a peer sends",
    r"\bmarshal\b": "marshal crashes on what a peer sends",
    r"\btorch\.load\b": "torch.load is pickle",
    r"(?<![.\w])(eval|exec)\(": "text must not become code",
    r"\brecv_pyobj\b|\bsend_pyobj\b": "these are pickle",
    r"tcp://\*|\b0\.0\.0\.0\b|INADDR_ANY": "a listener binds to a named interface",
    r"\bshared_memory\b": "an attaching process unlinks the owner's segment",
}
"""Patterns that no file of the package may contain."""

FORBIDDEN_EXCEPT = {
    r"\bdatetime\b(?! import timedelta\n)": ("a date is not a deadline", {"bench"}),
    r"\btime\.sleep\(": (
        "a waiting thread is woken, it does not poll",
        {"connectors.runtime.fault_points", "testing", "bench"},
    ),
    r"\btime\.time(_ns)?\b|\bfrom time import\b|CLOCK_REALTIME": (
        "only the monotonic clock counts, but where machines are compared",
        {"telemetry.timeline", "telemetry.tracing"},
    ),
    r"@(functools\.)?cached_property\b": (
        "before Python 3.12 all objects share its lock, which a fork may leave locked",
        {"models.bagel.tokenizer"},
    ),
    r"\btorch\.frombuffer\b": (
        "one place makes tensors of memory",
        {"payload.tensor_memory", "integrations.lmcache.chunks"},
    ),
}
"""Patterns that only the named files and folders may contain."""

_RETIRED = """
    Door Visitor Reader Want Wanted Unwant Exchange Arrival Store Guest Sending Landing Landings
    Fetch Place Paged Pages ViewWords Plane Gate Port Mates Agreement Holding Share Child RayChild
    Host Groups Yardstick Marks
    door doors visitor want wanted unwant exchange arrival arrivals guest guests gift landing
    landings place places paint paints painted mate mates meeting letter letters sheet sheets
    holding division handover parcel parcels hurry strand bury ghost ghosts blip blips hasty way
    ways became life lives wish wishes room words spoiler marks yardstick yardsticks limits battle
    stranger strangers safe victim victims plane gate exposure asked asking heard told tell ask
    hear say said house
"""
_WORD = r"(?<![\w-])[A-Za-z_]\w*(?![\w-])"
"""An identifier; not a part of `--in-place`."""
RETIRED = frozenset(_RETIRED.split())
"""Names of a former vocabulary; `docs/architecture.md` has the present one."""


class Import(NamedTuple):
    """One imported name: its dotted path, and the line of the import."""

    target: str
    line: int


class Module(NamedTuple):
    """One Python file of the package."""

    name: str
    source: str
    is_package: bool = False

    @property
    def path(self) -> str:
        """Below the package, dotted: `connectors.shm.rendezvous`; `__init__` for the root."""
        return self.name.partition(".")[2] or "__init__"


def modules(root: Path = ROOT) -> list[Module]:
    """Every Python file of the package."""
    found = []
    for path in sorted((root / NAME).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name, path.read_text(), is_package))
    return found


def imports(module: Module) -> Iterator[Import]:
    """Everything a file imports, wherever in the file the import stands."""
    package = module.name.split(".")[: None if module.is_package else -1]
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            yield from (Import(f"{source}.{alias.name}", node.lineno) for alias in node.names)


def home(target: str, known: Mapping[str, object]) -> str:
    """The module that a dotted name lives in; empty if it is none of the package's."""
    while target and target not in known:
        target = target.rpartition(".")[0]
    return target


def layer_of(path: str) -> tuple[int, str]:
    """The line of `LAYERS` that names a path, and the entry there; (-1, "") if none does."""
    at = {entry: number for number, line in enumerate(LAYERS) for entry in line.split()}
    entry = path
    while entry and entry not in at:
        entry = entry.rpartition(".")[0]
    return (at[entry], entry) if entry else (-1, "")


def is_below(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a dotted path is one of the prefixes or lies below one."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)


def import_errors(module: Module, known: Mapping[str, object]) -> Iterator[str]:
    """Imports that point up, sideways, past the public names, or to a package not allowed here."""
    number, entry = layer_of(module.path)
    if number < 0:
        yield f"{module.name}: no line of LAYERS names its folder"
        return
    top = module.path.split(".")[0]
    for target, line in imports(module):
        where = f"{module.name}:{line}"
        outside = target.split(".")[0]
        if outside != NAME:
            allowed = THIRD_PARTY.get(top, {outside})
            if outside not in sys.stdlib_module_names and outside not in allowed:
                yield f"{where} imports {target}"
            continue
        there = home(target, known).partition(".")[2] or "__init__"
        if not is_below(there.replace("__init__", ""), ONLY.get(top, {there, ""})):
            yield f"{where} imports {target}: {top} uses {', '.join(sorted(ONLY[top]))} alone"
        level, other = layer_of(there)
        if level > number or (level == number and other != entry):
            yield f"{where} imports {target}, which is not below {entry}"


def source_errors(module: Module) -> Iterator[str]:
    """Forbidden patterns and bare excepts."""
    for pattern, why in FORBIDDEN.items():
        if re.search(pattern, module.source):
            yield f"{module.name} has {pattern}: {why}"
    for pattern, (why, allowed) in FORBIDDEN_EXCEPT.items():
        if not is_below(module.path, allowed) and re.search(pattern, module.source):
            yield f"{module.name} has {pattern}: {why}"
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{module.name}:{node.lineno} has a bare except"


def loop_errors(module: Module) -> Iterator[str]:
    """Names that only a `for` loop binds, read after it: a loop over nothing leaves them unbound.

    A loop with an `else` says what happens then.
    """
    for scope in ast.walk(ast.parse(module.source)):
        if not isinstance(scope, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        nodes = list(_nodes_of(scope))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        stored = [name for name in names if not isinstance(name.ctx, ast.Load)]
        arguments = {node.arg for node in ast.walk(scope) if isinstance(node, ast.arg)}
        for loop in nodes:
            if not isinstance(loop, (ast.For, ast.AsyncFor)) or loop.orelse:
                continue
            lines = range(loop.lineno, (loop.end_lineno or 0) + 1)
            inside = {name.id for name in stored if name.lineno in lines}
            outside = {name.id for name in stored if name.lineno not in lines} | arguments
            for name in names:
                if name.lineno >= lines.stop and name.id in inside - outside:
                    yield f"{module.name}:{name.lineno} reads {name.id} after its loop"


def _nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of functions in it, and variables of comprehensions."""
    functions = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, functions):
            continue
        inner, private = list(_nodes_of(node)), set[str]()
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            targets = (part for loop in node.generators for part in ast.walk(loop.target))
            private = {part.id for part in targets if isinstance(part, ast.Name)}
        yield node
        yield from (part for part in inner if getattr(part, "id", "") not in private)


def cycle_errors(files: Iterable[Module]) -> Iterator[str]:
    """Import cycles, imports inside functions and under TYPE_CHECKING included."""
    known = {module.name: module for module in files}
    graph = {
        name: {home(target, known) for target, _ in imports(module)} - {name, ""}
        for name, module in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"import cycle: {' -> '.join(error.args[1])}"


def count_errors(files: Iterable[Module]) -> Iterator[str]:
    """Folders with more files directly in them than `MOST_MODULES` allows."""
    direct: dict[str, list[str]] = defaultdict(list)
    for module in files:
        folder, _, leaf = module.name.partition(".")[2].rpartition(".")
        if module.is_package:
            folder, leaf = module.name.partition(".")[2], "__init__"
        direct[folder].append(leaf)
    for folder, most in MOST_MODULES.items():
        if len(direct[folder]) > most:
            names = ", ".join(sorted(direct[folder]))
            yield f"{folder or NAME} has {len(direct[folder])} modules, {most} allowed: {names}"


def class_errors(files: Iterable[Module]) -> Iterator[str]:
    """Class names that are defined in two files."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in files:
        for node in ast.walk(ast.parse(module.source)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module.name)
    for name, where in found.items():
        if len(where) > 1:
            yield f"class {name} is defined {len(where)} times: {', '.join(where)}"


def retired_in_python(source: str) -> Iterator[tuple[str, int]]:
    """Identifiers of the former vocabulary, with their lines; strings and comments do not count."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.NAME or token.string.lstrip("_") not in RETIRED:
            continue
        if token.string != "marks" or not re.search(r"\bmarks=(pytest\b|[A-Z])", token.line):
            yield token.string, token.start[0]


def retired_in_text(source: str) -> Iterator[tuple[str, int]]:
    """The same in `code spans` of a page; code blocks are compared word by word, too."""
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("```"):
            is_code = line != "```"
            continue
        spans = re.findall(_WORD, line.split("#")[0]) if is_code else []
        for span in re.findall(r"`([^`]+)`", line):
            spans += re.findall(_WORD, span)
        yield from ((word, number) for word in spans if word in RETIRED)


def vocabulary_errors(root: Path = ROOT) -> Iterator[str]:
    """Retired names in the package, tests, examples, benchmarks and docs."""
    for folder in (NAME, "tests", "examples", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            for word, line in retired_in_python(path.read_text()):
                yield f"{path.relative_to(root)}:{line} uses {word}"
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        for word, line in retired_in_text(path.read_text()):
            yield f"{path.relative_to(root)}:{line} uses {word}"


def support_errors(root: Path = ROOT) -> Iterator[str]:
    """Modules among the tests that are no tests: `from support…` imports them at any place."""
    programs = {"tests/layout.py", "tests/vocabulary.py", "tests/payload/golden/make.py"}
    for path in sorted((root / "tests").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        is_test = path.name in ("conftest.py", "__init__.py") or path.name.startswith("test_")
        if not is_test and name not in programs and not name.startswith("tests/support/"):
            yield f"{name} belongs in tests/support"


def private_accesses(source: str) -> Iterator[tuple[int, str, str]]:
    """Private attributes of others, in dots or as texts for `setattr`: line, owner and name."""
    tree = ast.parse(source)
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    modules = {
        name.asname or name.name.partition(".")[0] for node in imports for name in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=str(name)):
                pass
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called),
                args=[value, ast.Constant(value=str(name)), *_],
            ) if called.endswith("attr"):
                pass
            case _:
                continue
        owner = ast.unparse(value)
        if re.match("_(?!_|replace$|asdict$)", name) and owner not in {*OWN, *modules}:
            yield value.lineno, owner, name


def private_errors_of(source: str) -> Iterator[str]:
    """Private accesses of a file without a reason, and reasons for names that it leaves alone.

    A reason is a comment on the line or on the one before. For a name in all of the file it is a
    comment at its head, of one line or more: `# Reaches into _end, _loop: the reason`.
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    reasons = {line for line, text in comments.items() if not re.fullmatch(DIRECTIVE, text)}
    explained = {
        name
        for names in re.findall(EXPLAINED, source, re.MULTILINE)
        for name in re.findall(r"\w+", names)
    }
    accesses = [*private_accesses(source)]
    for line, owner, name in accesses:
        if name not in explained and not {line - 1, line} & reasons:
            yield f"{line}: no comment says why {owner}.{name}"
    for name in sorted(explained - {name for _, _, name in accesses}):
        yield f"1: explains {name}, which it does not reach into"


def private_errors(root: Path = ROOT) -> Iterator[str]:
    """`private_errors_of` each file of the tests."""
    for path in sorted((root / "tests").rglob("*.py")):
        for error in private_errors_of(path.read_text()):
            yield f"{path.relative_to(root).as_posix()}:{error}"


def _of_files(errors: Callable[[list[Module]], Iterable[str]]) -> Callable[[], list[str]]:
    return lambda: list(errors(modules()))


def _imports_of_files(files: list[Module]) -> Iterator[str]:
    known = {module.name: module for module in files}
    return (error for module in files for error in import_errors(module, known))


def _sources_of_files(files: list[Module]) -> Iterator[str]:
    return (error for module in files for error in source_errors(module))


def _loops_of_files(files: list[Module]) -> Iterator[str]:
    return (error for module in files for error in loop_errors(module))


def _names_of_files(files: list[Module]) -> Iterator[str]:
    names = [name for module in files for name, _ in bound_names(ast.parse(module.source))]
    empty = Counter(name for name in names if is_empty(name))
    if empty.total() > MOST_EMPTY_NAMES * len(names):
        common = ", ".join(f"{name} {count}" for name, count in empty.most_common(8))
        yield f"{empty.total()} of {len(names)} names say nothing of what they name: {common}"


def _docstrings_of_files(files: list[Module]) -> Iterator[str]:
    for module in files:
        for word, line in fragments(ast.parse(module.source)):
            yield f"{module.name}:{line}: a docstring begins with {word!r}"


RULES: dict[str, Callable[[], list[str]]] = {
    "imports point down": _of_files(_imports_of_files),
    "no import cycle, lazy imports included": _of_files(cycle_errors),
    "few modules directly in a folder": _of_files(count_errors),
    "no class name defined twice": _of_files(class_errors),
    "no forbidden call": _of_files(_sources_of_files),
    "no loop variable after its loop": _of_files(_loops_of_files),
    "no retired name": lambda: list(vocabulary_errors()),
    "modules that tests share are in tests/support": lambda: list(support_errors()),
    "tests reach into private attributes with a reason": lambda: list(private_errors()),
    "few names are pronouns or adverbs": _of_files(_names_of_files),
    "no docstring begins as a fragment": _of_files(_docstrings_of_files),
}
"""Every rule; called, it returns what breaks it."""


def main() -> int:
    """Print each rule and what breaks it; the exit status is 1 if anything does."""
    found = {rule: errors() for rule, errors in RULES.items()}
    for rule, errors in found.items():
        print(f"{'ok  ' if not errors else 'FAIL'} {rule}")
        for error in errors:
            print(f"       {error}")
    lines = sum(module.source.count("\n") for module in modules())
    print(f"     {len(modules())} files, {lines:,} lines in {NAME}/")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
