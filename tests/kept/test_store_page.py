"""The guide to stores is followed by its commands alone, each in a process of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from support.doc_blocks import DOCS, ROOT, blocks
from support.kept.store_process import STORE, next_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

if not DOCS.exists():
    pytest.skip("installed without the sources", allow_module_level=True)

PAGE = blocks("docs/guides/store.md")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="kvl-") as runtime:
        yield {**os.environ, "XDG_RUNTIME_DIR": runtime, "PYTHONPATH": str(ROOT)}


def test_the_guide_is_followed(tmp_path: Path, environment: dict[str, str]) -> None:
    for block in PAGE:
        if block.first.startswith("# "):
            (tmp_path / block.first.removeprefix("# ")).write_text(block.text)
    shell = [
        shlex.split(line) for one in PAGE if one.language == "sh" for line in lines_of(one.text)
    ]
    [install, store, *scripts] = shell
    assert install[:2] == ["pip", "install"]
    assert store[:2] == ["kvlink", "store"]
    [expected] = [block.text for block in PAGE if block.language == "output"]
    settings = {"cwd": tmp_path, "env": environment, "text": True, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", STORE, *store[1:]]
    for number in range(2):  # the second time, without the writer
        with subprocess.Popen(command, **settings) as process:  # type: ignore[call-overload]
            try:
                assert next_line(process).startswith("serving shm://store")
                for script in scripts[number:]:
                    assert script[0] == "python"
                    done = subprocess.run([sys.executable, *script[1:]], check=True, **settings)  # type: ignore[call-overload]
                assert done.stdout == expected
                process.send_signal(signal.SIGTERM)
                assert process.wait() == 0
            finally:
                process.kill()


def lines_of(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()
