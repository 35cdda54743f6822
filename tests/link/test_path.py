"""The files that one tensor enters from `put` to a view over shared memory; see architecture.md."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import omni_kvlink
from omni_kvlink import KVCacheTransferData, KVLink, Received
from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

PACKAGE = Path(omni_kvlink.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
MOST_FILES = 27


class Trace:
    """Collects the package's files whose functions run, in every thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if self.is_on and event == "call" and path.startswith(str(PACKAGE)):
            self.files.add(str(Path(path).relative_to(PACKAGE)))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def transfer(sockets: str, trace: Trace) -> None:
    """Put and get two caches; the second one, with everything warm, is traced."""
    with (
        KVLink.serve("shm://path", directory=sockets) as producer,
        KVLink.connect("shm://path", timeout=60, directory=sockets) as consumer,
    ):
        for name in ("cold", "warm"):
            layers: dict[str, Any] = {"key_cache": [torch.randn(1024, 4, 64)]}
            layers["value_cache"] = [torch.randn(1024, 4, 64)]
            about = {"kv_lens": [1024], "ropes": [1024], "num_layers": 1}
            cache = KVCacheTransferData(name, layers, metadata=about)
            received: list[Received] = []
            get: Callable[[], None] = lambda name=name, into=received: into.append(  # type: ignore[misc]  # noqa: E731
                consumer.get(name, timeout=60)
            )
            trace.is_on = name == "warm"
            thread = threading.Thread(target=get)
            thread.start()
            receipt = producer.put(cache)
            thread.join()
            assert received[0].data.tensors()[0].shape == (1024, 4, 64)
            trace.is_on = False
            received[0].release()
            receipt.wait(timeout=60)  # else the next one needs an arena of its own
            until(lambda: "kvlink-memory" not in threads(), "the mapping is touched")


@pytest.mark.skipif(not PAGE.exists(), reason="installed without the sources")
def test_the_page_lists_the_files_between_put_and_a_view(sockets: str) -> None:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        transfer(sockets, trace)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    section = PAGE.read_text().partition("### One tensor")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w/]+\.py)`", section, re.MULTILINE))
    assert trace.files == listed
    assert len(listed) <= MOST_FILES
