"""The example of thinker and talker: its verdict over each connector, and how it can be lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omni_kvlink import UnavailableError
from omni_kvlink.connectors.registry import backend, split_url
from support.processes.fork_server import NESTED

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: make test-hf"
)
if not hasattr(transformers, "Qwen2_5OmniConfig"):
    pytest.skip(
        f"transformers {transformers.__version__} has no Qwen2.5-Omni", allow_module_level=True
    )

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEWEST = pytest.mark.skipif(
    int(transformers.__version__.partition(".")[0]) < 5,
    reason="a minute, with the newest transformers alone",
)
URLS = ["shm://tt", "zmq+tcp://127.0.0.1:0", "ucx://127.0.0.1:0?trusted_network=1"]
COMPARED = ("text", "codec tokens", "hidden states", "logits", "audio")
WINDOW = 4
AFTER = 5
"""The program changes chunk 5 of one of four requests."""


def run(script: Path, root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"XDG_RUNTIME_DIR": str(root), NESTED: "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, str(script), "--out", str(root / "out"), *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


def verdicts(output: str) -> dict[str, int]:
    """Of each thing that is compared, the number of requests whose is the single process's."""
    lines = re.findall(r"^  (\w[\w ]*?) +(identical|DIFFERENT): (\d) of 4", output, re.MULTILINE)
    assert all((word == "identical") == (number == "4") for _, word, number in lines)
    return {name: int(number) for name, _, number in lines}


@pytest.mark.parametrize(
    "url",
    [URLS[0], *(pytest.param(url, marks=NEWEST) for url in URLS[1:])],
    ids=lambda url: split_url(url)[0],
)
def test_two_processes_equal_one(tmp_path: Path, url: str) -> None:
    try:
        backend(split_url(url)[0])
    except UnavailableError as error:
        pytest.skip(str(error))
    done = run(EXAMPLES / "thinker_talker.py", tmp_path, "--connector", url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdicts(done.stdout) == dict.fromkeys(COMPARED, 4)
    overlap = re.findall(r"(\d+) chunks, .* before the last (\d+) of", done.stdout)
    assert len(overlap) == 4
    # The thinker waits in append WINDOW chunks ahead, and the talker's first step needs two.
    assert all(int(left) >= int(chunks) - WINDOW - 2 > 0 for chunks, left in overlap)
    rows = json.loads((tmp_path / "out" / "thinker_talker.json").read_text())["ms"]
    picture = (tmp_path / "out" / "thinker_talker.svg").read_text()
    assert len(rows) == 8
    assert picture.count("<rect") == 1 + 3 + sum(len(spans) for _, spans in rows)


WRAPPER = """
import sys
import thinker_talker
from omni_kvlink.link.append_stream import AppendStream

{change}

def append(self, tensors, metadata=None, *, timeout=10.0):
    if (self.request_id, self.count) == ("req-1", {after}):
        tensors = changed(self, tensors)
    return right(self, tensors, metadata, timeout=timeout)

if __name__ == "__main__":
    right, AppendStream.append = AppendStream.append, append
    sys.exit(thinker_talker.main())
"""
ANOTHER = """
def changed(stream, tensors):
    hidden = tensors["hidden"].clone()
    hidden[0, 0, 0] += 0.01
    return {**tensors, "hidden": hidden}
"""
DAMAGED = """
class Damage:
    def __init__(self, copier):
        self._copier = copier
    def __getattr__(self, name):
        return getattr(self._copier, name)
    def gather(self, views, plan, region, **options):
        digests = self._copier.gather(views, plan, region, **options)
        at = plan.header_nbytes + plan.tensors[2].start
        region.write(at, bytes([region.read(at, at + 1)[0] ^ 1]))
        return digests

def changed(stream, tensors):
    operation = stream._head.operation
    operation.copier = Damage(operation.copier)
    return tensors
"""


def wrapper(root: Path, change: str) -> Path:
    """The example, with one append of the thinker that is not the right one."""
    script = root / "wrapper.py"
    script.write_text(WRAPPER.format(change=change, after=AFTER))
    return script


@NEWEST
def test_another_state_of_one_token_is_noticed(tmp_path: Path) -> None:
    """The text is that of one process, and the speech of one request is not."""
    done = run(wrapper(tmp_path, ANOTHER), tmp_path, "--connector", URLS[0])
    assert done.returncode == 1, done.stdout + done.stderr
    found = verdicts(done.stdout)
    assert found, done.stdout + done.stderr
    assert found["text"] == 4
    assert (found["hidden states"], found["logits"]) == (3, 3)
    assert (tmp_path / "out" / "thinker_talker.svg").exists()


@NEWEST
@pytest.mark.parametrize("url", URLS[:2], ids=lambda url: split_url(url)[0])
def test_a_damaged_chunk_is_refused(tmp_path: Path, url: str) -> None:
    """A bit is another one after its digest was computed: no output, and no long wait."""
    done = run(wrapper(tmp_path, DAMAGED), tmp_path, "--connector", url)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "IntegrityError" in done.stderr
    assert verdicts(done.stdout) == {}
