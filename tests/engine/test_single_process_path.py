"""docs/engine.md names every file that a request enters in the engine, with its length."""

from __future__ import annotations

import ast
import io
import re
import sys
import threading
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

import omni_kvlink.engine
from omni_kvlink.engine import DiffusionEngine
from support.engine.fixtures import WAIT, alone, bundle, config, link, request

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(omni_kvlink.engine.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (\d+) \|", re.MULTILINE)


def entered(sockets: str) -> set[str]:
    """Files of the engine in which one request, whose KV comes over shm, runs a function."""
    found: set[str] = set()
    is_on = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        if is_on and event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            found.add(frame.f_code.co_filename[len(str(ROOT)) + 1 :])

    before = sys.getprofile()
    threading.setprofile(profile)  # for the threads of the engine and of its KV manager
    try:
        with link(sockets) as producer, DiffusionEngine(config(producer, sockets)) as engine:
            producer.put(bundle("r"))
            expected = alone()
            sys.setprofile(profile)
            is_on = True
            output = engine.submit(request("r")).result(WAIT)
            is_on = False
            assert output.result().equal(expected[None])
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return found


def lines_of_code(source: str) -> int:
    """Lines that have more than a docstring or a comment on them."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node.value.value, str):
            documentation |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)


def test_the_page_lists_the_single_process_path(sockets: str) -> None:
    listed = {name: int(lines) for name, lines in ROW.findall(PAGE.read_text())}
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in entered(sockets)}
    assert listed == lengths
    engine = {name: lines for name, lines in lengths.items() if not name.startswith("models/")}
    code = sum(lines_of_code((ROOT / name).read_text()) for name in engine)
    assert sum(engine.values()) <= 1650
    assert f"{len(engine)} files of the engine, {sum(engine.values()):,} lines" in PAGE.read_text()
    assert f"({code:,} without docstrings" in PAGE.read_text()
