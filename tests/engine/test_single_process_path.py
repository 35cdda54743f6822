"""docs/engine.md names every file that a request enters in the engine, with its length."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
from engine_fixtures import WAIT, alone, bundle, config, link, request

import omni_kvlink.engine
from omni_kvlink.engine import DiffusionEngine

ROOT = Path(omni_kvlink.engine.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
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
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


@pytest.mark.timeout(60)
def test_the_page_lists_the_single_process_path(sockets: str) -> None:
    listed = {name: int(lines) for name, lines in ROW.findall(PAGE.read_text())}
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in entered(sockets)}
    assert listed == lengths
    engine = sum(lines for name, lines in lengths.items() if not name.startswith("models/"))
    assert engine <= 1500
    assert f"{engine:,} lines" in PAGE.read_text()
