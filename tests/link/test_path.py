"""The files and functions that one tensor enters from `put` to a view; see architecture.md."""

from __future__ import annotations

import re
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import omni_kvlink
from omni_kvlink import (
    KVCacheTransferData,
    KVLink,
    Received,
    TensorTransferData,
)
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.testing.rig import until
from support.connectors.held_loops import leader_of
from support.faults.harness import until_loops_sleep
from support.link.ends import session_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from omni_kvlink import KVConsumer

PACKAGE = Path(omni_kvlink.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"


class Case(NamedTuple):
    """A transfer, and the files and functions that both sides may enter for it."""

    scheme: str
    tokens: int
    files: int
    functions: int


CASES = {
    "shm": Case("shm", 1024, files=27, functions=185),
    "inline": Case("shm", 1, files=28, functions=135),
    "zmq+ipc": Case("zmq+ipc", 1024, files=30, functions=310),
}
ALONE = {
    "shm": "connectors/shm/",
    "zmq+ipc": "connectors/control/ connectors/protocol/fetch_plan.py",
    "inline": "payload/expected.py payload/bundle.py",
    "arena": "memory/arena_index.py",  # in which a packed one needs no room
}
"""Folders and files that only some transfers enter."""


class Trace:
    """Collects the package's functions that run, in every thread, by their files."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, str] = {}
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if self.is_on and event == "call" and path.startswith(str(PACKAGE)):
            self.functions[frame.f_code] = str(Path(path).relative_to(PACKAGE))

    def __enter__(self) -> Trace:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def is_leading(consumer: KVConsumer, thread: threading.Thread) -> bool:
    return leader_of(session_of(consumer)) == thread.ident


def waits_for(condition: Callable[[], bool]) -> bool:
    """Whether it comes true before long."""
    for _ in range(2000):
        if condition():
            return True
        time.sleep(0.002)
    return False


def transfer(
    url: str, tokens: int, sockets: str, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put and get five caches; the last three, with everything warm, are traced.

    A get counts if its thread receives the answer: on a busy machine the loop may be first. What a
    thread enters only if another one was slower is no part of the path: it is not in all three.
    """
    traced: list[dict[CodeType, str]] = []
    with (
        KVLink.serve(url, directory=sockets) as producer,
        KVLink.connect(url, timeout=60, directory=sockets) as consumer,
    ):
        number = led = 0
        while led < 5:
            name, number = f"cache-{number}", number + 1
            layers: dict[str, Any] = {"key_cache": [torch.randn(tokens, 4, 64)]}
            layers["value_cache"] = [torch.randn(tokens, 4, 64)]
            about = {"kv_lens": [tokens], "ropes": [tokens], "num_layers": 1}
            cache = KVCacheTransferData(name, layers, metadata=about)
            received: list[Received] = []
            get: Callable[[], None] = lambda name=name, into=received: into.append(  # type: ignore[misc]  # noqa: E731
                consumer.get(name, timeout=60)
            )
            trace.functions.clear()
            trace.is_on = led >= 2
            thread = threading.Thread(target=get)
            thread.start()
            sys.setprofile(None)  # what this thread looks at is no part of the transfer
            is_led = waits_for(partial(is_leading, consumer, thread))
            sys.setprofile(trace)
            receipt = producer.put(cache)
            thread.join()
            assert received[0].data.tensors()[0].shape == (tokens, 4, 64)
            trace.is_on = False
            if is_led and led >= 2:
                traced.append(dict(trace.functions))
            led += is_led
            received[0].release()
            receipt.wait(timeout=60)  # else the next one needs an arena of its own
            until(lambda: "kvlink-memory" not in threads(), "the mapping is touched")
            until_loops_sleep(monkeypatch)  # else the next get leaves the receiving to the loop
    everywhere = set.intersection(*map(set, traced))
    trace.functions = {code: file for code, file in traced[0].items() if code in everywhere}


@pytest.mark.skipif(not PAGE.exists(), reason="installed without the sources")
@pytest.mark.parametrize("name", CASES)
def test_the_page_lists_the_files_between_put_and_a_view(
    name: str, sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    path = "path" if case.scheme == "shm" else f"{sockets}/path.sock"
    with Trace() as trace:
        transfer(f"{case.scheme}://{path}", case.tokens, sockets, trace, monkeypatch)
    section = PAGE.read_text().partition("### One tensor")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w/]+\.py)`", section, re.MULTILINE))
    own = {name, case.scheme} | ({"arena"} if case.tokens > 1 else set())
    others = tuple(" ".join(each for key, each in ALONE.items() if key not in own).split())
    files = set(trace.functions.values())
    assert files == {file for file in listed if not file.startswith(others)}
    assert len(files) <= case.files
    if name == case.scheme:
        start = {"shm": "", "zmq+ipc": "Over `zmq+ipc` there are "}[name]
        assert f"\n\n{start}{len(files)}" in section
    assert len(trace.functions) <= case.functions


STEPS = [
    "PutOperation.run",
    "PutOperation.reserve",
    "PooledProducer.reserve",
    "PutOperation.publish",
    "PooledProducer.publish",
    "TransferTable.commit",
]
"""The functions that every put passes through, once each, in this order."""


def steps_of(call: Callable[[], object]) -> list[str]:
    """Those of `STEPS` that a call enters, in this thread."""
    entered = list[str]()

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        name = getattr(frame.f_code, "co_qualname", "")  # since Python 3.11
        if event == "call" and name in STEPS:
            entered.append(name)

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
def test_every_put_passes_through_the_same_functions(sockets: str) -> None:
    small, large = torch.ones(16), torch.ones(1 << 19)

    def payload(key: str, tensor: torch.Tensor) -> TensorTransferData:
        return TensorTransferData(key, {"h": tensor})

    with KVLink.serve("shm://path", directory=sockets, quota=1 << 28) as producer:
        batch = [payload(f"b{number}", (small, large)[number % 2]) for number in range(64)]
        steps = {
            "small": steps_of(lambda: producer.put(payload("small", small))),
            "large": steps_of(lambda: producer.put(payload("large", large))),
            "batch": steps_of(lambda: producer.put_many(batch)),
        }
        allocation = producer.allocate(payload("allocated", large))
        steps["allocated"] = steps_of(lambda: producer.put(allocation.data))
        with producer.open_stream("stream", {"h": small}) as stream:
            steps["small chunk"] = steps_of(lambda: stream.append({"h": small}))
            steps["large chunk"] = steps_of(lambda: stream.append({"h": large}))
    with (
        KVLink.serve(f"zmq+ipc://{sockets}/direct.sock") as producer,
        KVLink.connect(producer.url, timeout=60) as consumer,
    ):
        get = begin_get(consumer, "direct", timeout=60)
        put = partial(producer.put, payload("direct", large), direct=True, timeout=60)
        steps["direct"] = steps_of(put)
        get.cancel()
    assert steps == dict.fromkeys(steps, STEPS)
