"""A tensor that changes at any line of a put until its address is taken, on every way.

It is refused by name, or the bytes before or after the change are sent. From the call that takes
the address on, a change would be one at the same time, which no program may make.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import omni_kvlink
from omni_kvlink import SchemaError
from omni_kvlink.payload import tensor_memory
from omni_kvlink.payload.views import same_bytes
from support.payloads.storage_changes import cut, free, replace_by_a_short_one
from support.payloads.tensor_ways import ANY, OF_CACHES, Links, links

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from support.payloads.tensor_ways import Way

LIBRARY = str(Path(omni_kvlink.__file__).parent)
TAKING = {tensor_memory.address_of.__code__, tensor_memory.are_whole.__code__}
"""Where addresses are taken, or the storages of tensors whose addresses the library takes."""
SMALL, MIDDLE, LARGE = 4, 1_000, 31_250
"""Tokens of 32 floats: 128, 32,000, and 1,000,000. Only the first are packed in one native call."""
STRIDE = 23
"""Of how many lines one is tried, where not all are."""


@pytest.fixture(scope="module", params=["native", "torch"])
def to(request: pytest.FixtureRequest) -> Iterator[Links]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with links(path, f"lines-{request.param}", request.param, 1 << 15) as opened:
            yield opened


class Lines:
    """Counts the lines that the library runs, and makes a change at one of them.

    Args:
        storage: of the tensor, by its identity.
        at: before which line `change` is called; 0 for none.
        taken: number of calls that take an address, before the last of which it is called.
    """

    def __init__(self, storage: int, at: int, taken: int, change: Callable[[], None]):
        self._storage, self._at, self._limit, self._change = storage, at, taken, change
        self.lines = self.taken = 0
        self.last = (0, 0)
        """Lines and calls before the last call that took the tensor's address."""
        self.has_changed = False

    def start(self) -> None:
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(LIBRARY):
            return None
        if code in TAKING:
            self._take(code, frame)
        return self._line

    def _take(self, code: CodeType, frame: FrameType) -> None:
        values = frame.f_locals
        found = [values["tensor"]] if "tensor" in values else values["tensors"]
        if any(_storage(tensor) == self._storage for tensor in found):
            self.last = (self.lines, self.taken)
        self.taken += 1

    def _line(self, _: FrameType, event: str, __: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at and self.taken <= self._limit:
                self.has_changed = True
                sys.settrace(None)
                self._change()
                return None
        return self._line


def _storage(tensor: torch.Tensor) -> int:
    # torch has no public name for which storage it is: an address may be another's later.
    identity: int = tensor.untyped_storage()._cdata
    return identity


def give_other_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.full(tensor.shape, 7.0)


def swap(tensor: torch.Tensor) -> None:
    other = torch.full(tensor.shape, 7.0)
    tensor.set_(other.untyped_storage(), 0, tensor.shape, other.stride())


def shrink(tensor: torch.Tensor) -> None:
    tensor.resize_(1, 4, 4)
    cut(tensor)


def grow(tensor: torch.Tensor) -> None:
    tensor.resize_(2 * len(tensor) + 1, 4, 8).fill_(7)


def transpose(tensor: torch.Tensor) -> None:
    tensor.transpose_(0, 1)


CHANGES = (
    *(cut, free, replace_by_a_short_one),
    *(give_other_data, swap, shrink, grow, transpose),
)
LOSSES = CHANGES[:3]
"""What leaves no bytes to send."""


def run(
    to: Links, send: Way, size: int, change: Callable[[torch.Tensor], None], at: int, taken: int
) -> tuple[Lines, str]:
    """Send a tensor that changes at a line; return what was counted, and what became of it."""
    tensor = torch.rand(size, 4, 8)
    before, alias = tensor.clone(), tensor.detach()
    lines = Lines(_storage(tensor), at, taken, lambda: change(tensor))
    try:
        received = send(to, tensor, lines.start)
    except SchemaError as error:
        if not lines.has_changed or not any(word in str(error) for word in ("tensor", "layer")):
            raise
        return lines, "refused"
    finally:
        sys.settrace(None)
    if not lines.has_changed or same_bytes(received, before):
        assert same_bytes(received, before)
        assert not lines.has_changed or change not in LOSSES or change is LOSSES[2]
        return lines, "before"
    assert change not in LOSSES
    is_of_a_moment = same_bytes(received, tensor) or same_bytes(received, alias)
    assert is_of_a_moment, "bytes of no moment"
    return lines, "after"


def try_lines(to: Links, send: Way, size: int, stride: int) -> None:
    seen = dict.fromkeys(("refused", "before", "after"), 0)
    for _ in range(2):  # the second time, nothing is done for the first time
        whole, outcome = run(to, send, size, cut, 0, 0)
        assert outcome == "before"
    last, taken = whole.last
    assert last > 5, "too few lines: the way does not pass where addresses are taken"
    for number, change in enumerate(CHANGES):
        for at in range(1 + number % stride, last + 1, stride):
            lines, outcome = run(to, send, size, change, at, taken)
            seen[outcome] += lines.has_changed
    print(f"{send.__name__}, {32 * size} elements: {last} of {whole.lines} lines, {seen}")
    assert seen["refused"] > 0 < seen["after"]


@pytest.mark.parametrize("send", ANY + OF_CACHES, ids=lambda send: send.__name__)
def test_some_lines(to: Links, send: Way) -> None:
    try_lines(to, send, SMALL, STRIDE)


@pytest.mark.slow
@pytest.mark.parametrize("send", ANY + OF_CACHES, ids=lambda send: send.__name__)
def test_every_line(to: Links, send: Way) -> None:
    try_lines(to, send, SMALL, 1)
    try_lines(to, send, LARGE, STRIDE // 3)


@pytest.mark.slow
@pytest.mark.parametrize("send", ANY + OF_CACHES, ids=lambda send: send.__name__)
def test_every_line_of_what_is_gathered(to: Links, send: Way) -> None:
    try_lines(to, send, MIDDLE, 1)
