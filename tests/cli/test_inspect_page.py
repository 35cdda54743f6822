"""The commands of the page about inspection print what it says."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_kvlink.cli.commands import run
from omni_kvlink.payload import manifest
from support.doc_blocks import DOCS, ROOT, Block, blocks, directory, execute
from support.processes.fork_server import new_interpreters

if not DOCS.exists():
    pytest.skip("installed without the sources", allow_module_level=True)

PAGE = "docs/guides/inspect.md"
MAY_FAIL = ("inspect received", "diff sent")
"""The commands that find something wrong."""


def printed(command: str, stack: contextlib.ExitStack) -> str:
    """What a command of the page prints; one that ends with & is a process beside the others."""
    name, *argv = command.split()
    if argv[-1] == "&":
        argv = argv[: argv.index(">")]
        with new_interpreters():
            started = [sys.executable, "-m", "omni_kvlink.cli", *argv]
            process = subprocess.Popen(started, stdout=subprocess.DEVNULL, env=environment())
        stack.enter_context(process)
        return ""
    if name != "kvlink":
        return subprocess.run([name, *argv], check=True, capture_output=True, text=True).stdout
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = run(argv)
    assert status == (" ".join(argv).startswith(MAY_FAIL)), command
    return output.getvalue()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def comparable(text: str) -> str:
    """A text without what differs from run to run: ages, columns' widths, what is mapped."""
    text = re.sub(r"\d+(\.\d+)? (s|min)\b", "TIME", text)
    text = re.sub(r"\d+(\.\d+)? [kMG]B mapped", "SIZE mapped", text)
    return re.sub(r" +", " ", re.sub(r"─+", "─", text))


def session(block: Block) -> str:
    """The block as it must be: each command, and what it prints."""
    lines = list[str]()
    with contextlib.ExitStack() as stack:
        for line in block.text.splitlines():
            if line.startswith("$ "):
                lines += [line, *printed(line[2:], stack).splitlines()]
    return "\n".join(lines) + "\n"


def test_the_commands_print_what_the_page_says(
    tmp_path: Path, sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(manifest, "__version__", "0.2.0")
    monkeypatch.setattr(platform, "node", lambda: "prefill-0")
    namespace: dict[str, Any] = {}
    with directory(tmp_path):
        for block in blocks(PAGE):
            if block.language == "python":
                execute([block], namespace)
            elif block.text.startswith("$ "):
                is_live = block.text.startswith("$ kvlink inspect shm:")
                shown, expected = session(block), block.text
                assert [shown, comparable(shown)][is_live] == [expected, comparable(expected)][
                    is_live
                ]
    (Path(sockets) / "kvlink").rmdir()  # no socket is left
