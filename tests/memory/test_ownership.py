"""What is taken has an owner before an interrupt can come; what is freed is released after one."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.memory import region as memory_region
from omni_kvlink.memory.region import CallAtEnd, Finalizer, Lease, Region, take

if TYPE_CHECKING:
    from types import FrameType

# Reaches into _alive: a finalizer that is kept after its end costs memory, and shows nowhere.

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Owned:
    pass


def dropped(number: int) -> tuple[list[str], bool]:
    """The calls of a finalizer whose n-th line is interrupted; False if it has fewer."""
    calls, owner, raised, lines = list[str](), [Owned()], list[int](), list[int]()
    CallAtEnd.of(owner[0], lambda: calls.append("released"))

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != memory_region.__file__:
            return None
        if event in ("call", "line"):
            lines.append(frame.f_lineno)
            if len(lines) == number:
                raised.append(number)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        owner.clear()
    finally:
        sys.settrace(before)
    return calls, bool(raised)


def test_an_interrupt_at_any_line_loses_no_finalizer() -> None:
    number, was_interrupted = 0, True
    before = len(Finalizer._alive)
    while was_interrupted:
        number += 1
        calls, was_interrupted = dropped(number)
        assert set(calls) == {"released"}, number
        assert was_interrupted or len(calls) == 1
    assert number > 8
    assert len(Finalizer._alive) <= before + 1


def test_it_is_called_once() -> None:
    calls, owner = list[int](), Owned()
    finalizer = CallAtEnd.of(owner, lambda: calls.append(1))
    finalizer.run()
    finalizer.run()
    del owner
    assert calls == [1]
    owner = Owned()
    finalizer = CallAtEnd.of(owner, lambda: calls.append(2))
    assert finalizer.detach()
    assert not finalizer.detach()
    del owner
    assert calls == [1]


def test_what_a_function_of_c_returns_is_in_the_list() -> None:
    found = list[tuple[int, int]]()
    assert take(found, divmod, 17, 5) == (3, 2)
    assert found == [(3, 2)]


def test_a_lease_that_is_dropped_releases_its_memory() -> None:
    calls = list[str]()
    region = Region.private(64)

    def lease() -> Lease:
        return Lease(region, lambda: calls.append("released"), None, lambda: calls.append("drop"))

    one = lease()
    del one
    gc.collect()
    assert calls == ["drop"]
    lease().release()
    assert calls == ["drop", "released"]
    lease().move()
    assert calls == ["drop", "released"]
