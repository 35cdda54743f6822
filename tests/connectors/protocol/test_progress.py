"""The progress of a streamed payload: what a peer may announce, and which answers it sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVLinkError, PeerLostError, WireError
from omni_kvlink.connectors.protocol.progress import Progress

if TYPE_CHECKING:
    from omni_kvlink.system.waits import Answer

ONE = (b"1234",)


@pytest.fixture
def progress() -> Progress:
    return Progress()


def state(answer: Answer[None]) -> str:
    if not answer.is_set():
        return "waiting"
    return "there" if answer.error is None else type(answer.error).__name__


def test_woken_when_all_tensors_of_a_layer_are_there(progress: Progress) -> None:
    layer, other = progress.when(range(2, 4)), progress.when(range(2))
    progress.announce(3, ONE)
    assert state(layer) == "waiting"
    progress.announce(2, ONE)
    assert state(layer) == "there"
    assert state(other) == "waiting"
    assert state(progress.when(range(2, 4))) == "there"
    assert progress.digest(3) == b"1234"


def test_commit_with_a_gap(progress: Progress) -> None:
    """Waiting for tensors that were never announced fails at the commit, and at once after it."""
    progress.announce(0, ONE)
    gap = progress.when(range(2))
    progress.commit()
    assert state(progress.whole) == "there"
    assert state(gap) == "WireError"
    assert state(progress.when(range(1))) == "there"
    assert state(progress.when(range(1, 2))) == "WireError"


@pytest.mark.parametrize("first", ["end", "commit"])
def test_only_the_first_ending_counts(progress: Progress, first: str) -> None:
    progress.announce(0, ONE)
    waiting = progress.when(range(2))
    if first == "commit":
        progress.commit()
    progress.fail(PeerLostError("gone"))
    progress.commit()
    progress.fail(KVLinkError("later"))
    there = first == "commit"
    assert state(progress.whole) == ("there" if there else "PeerLostError")
    assert state(waiting) == ("WireError" if there else "PeerLostError")
    assert state(progress.when(range(1))) == ("there" if there else "PeerLostError")


def test_cancelled_answers_are_not_set(progress: Progress) -> None:
    answer = progress.when(range(1))
    progress.cancel(answer)
    progress.announce(0, ONE)
    progress.fail(KVLinkError("over"))
    assert state(answer) == "waiting"


@pytest.mark.parametrize("first", [4096, 4095, 2**53])
def test_numbers_are_bounded(progress: Progress, first: int) -> None:
    with pytest.raises(WireError):
        progress.announce(first, ONE * 2)


def test_memory_is_bounded(progress: Progress) -> None:
    for tensor in range(17):
        progress.announce(tensor, (b"x" * 60_000,))
    with pytest.raises(WireError, match="no payload"):
        progress.announce(17, (b"x" * 60_000,))
    # How much of a peer is kept: there is no counter, the limit is one of memory.
    assert sum(map(len, progress._digests.values())) <= 1 << 20


def test_nothing_is_announced_twice(progress: Progress) -> None:
    """A digest that was used is not replaced."""
    progress.announce(0, ONE * 2)
    with pytest.raises(WireError, match="twice"):
        progress.announce(1, (b"9999",))
    assert progress.digest(1) == b"1234"
