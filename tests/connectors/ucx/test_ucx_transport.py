"""`UcxTransport` between two real processes: exact bytes or one error, and no leaks."""

from __future__ import annotations

import importlib.util
import os
import time

import pytest

from omni_kvlink import WireError
from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.ucx.addressing import SECRET_NBYTES, tag_of
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.testing.rig import until

# Reaches into _any_tag, _call, _open_worker, _worker: a message arrives within one round of the
# transport's thread.

if importlib.util.find_spec("ucxx") is None:  # loading it would change every other test's process
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

from support.connectors.ucx_killed_process import PATIENCE, pattern
from support.connectors.ucx_transports import BIG, Outcome, Pair, TrackedMemory
from support.connectors.ucx_transports import fresh_pair as fresh_pair
from support.connectors.ucx_transports import pair as pair
from support.connectors.ucx_transports import shared_process as shared_process

pytestmark = pytest.mark.usefixtures("leaves_nothing")


# Bytes


@pytest.mark.parametrize(
    "nbytes", [0, 1, 8191, 8193, 12_345, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 1_000_003]
)
def test_every_byte_arrives_both_ways(pair: Pair, nbytes: int) -> None:
    memory = bytearray(nbytes)
    outcome, number = pair.fetch(memory, 7, seed=nbytes)
    assert (outcome.wait(), pair.remote.answer(number)) == (None, None)
    assert memory == pattern(nbytes, nbytes)
    outcome, number = pair.push(memory, 8, seed=nbytes)
    assert (outcome.wait(), pair.remote.answer(number)) == (None, None)
    assert outcome.threads == ["kvlink-ucx"]


def test_a_whole_cache_in_one_message_into_an_arena(pair: Pair) -> None:
    nbytes = BIG
    region = Mapping.anonymous(nbytes + 1).region
    region.view()[-1] = 0x5A
    outcome = Outcome()
    pair.ucx_transport.receive(pair.peer, region.slice(0, nbytes), 9, outcome)
    number = pair.remote.submit("send", to=pair.me, nbytes=nbytes, tag=9, seed=3)
    assert (outcome.wait(), pair.remote.answer(number)) == (None, None)
    assert region.view()[:nbytes] == pattern(nbytes, 3)
    assert region.view()[-1] == 0x5A


def test_readonly_memory_can_be_sent(pair: Pair) -> None:
    source = memoryview(bytes(pattern(70_000, 4)))
    outcome, number = pair.push(source, 10, seed=4)
    assert (outcome.wait(), pair.remote.answer(number)) == (None, None)


def test_memory_with_gaps_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="gaps"):
        pair.ucx_transport.send(pair.peer, memoryview(bytearray(10))[::2], 1, Outcome())


def test_many_at_once_do_not_mix(pair: Pair) -> None:
    sizes = [(number * 7919) % 300_000 for number in range(64)]
    memories = [bytearray(nbytes) for nbytes in sizes]
    fetches = [
        pair.fetch(memory, 100 + number, seed=number) for number, memory in enumerate(memories)
    ]
    pushes = [
        pair.push(pattern(nbytes, number), 200 + number, seed=number)
        for number, nbytes in enumerate(sizes)
    ]
    for outcome, number in fetches + pushes:
        assert (outcome.wait(), pair.remote.answer(number)) == (None, None)
    for number, memory in enumerate(memories):
        assert memory == pattern(sizes[number], number), number
    assert pair.stat("waiting") == pair.stat("active") == pair.stat("stale") == 0


# Lengths and tags


@pytest.mark.parametrize("nbytes", [5000, 500_000])
@pytest.mark.parametrize("more", [-1, 1])
def test_another_length_is_an_error_and_writes_nothing(pair: Pair, nbytes: int, more: int) -> None:
    memory = bytearray(nbytes)
    outcome, number = pair.fetch(memory, 11, nbytes=nbytes + more)
    error = outcome.wait()
    assert isinstance(error, WireError)
    assert f"{nbytes + more} bytes for {nbytes}" in str(error)
    assert pair.remote.answer(number) is None  # the sender's memory is not kept
    assert not any(memory)
    pair.warm()


@pytest.mark.parametrize("nbytes", [0, 5000, 500_000])
def test_a_message_without_a_receive_is_discarded(pair: Pair, nbytes: int) -> None:
    secret = os.urandom(SECRET_NBYTES)
    old, new = (tag_of(secret, 1, epoch, 0, nbytes) for epoch in (1, 2))
    memory = bytearray(nbytes)
    outcome = Outcome()
    pair.ucx_transport.receive(pair.peer, memory, new, outcome)
    stale = pair.remote.submit("send", to=pair.me, nbytes=nbytes, tag=old, seed=1)
    assert pair.remote.answer(stale) is None
    until(lambda: pair.stat("stale") == 1, "the stale message was counted")
    assert not any(memory)
    assert outcome.calls == []
    number = pair.remote.submit("send", to=pair.me, nbytes=nbytes, tag=new, seed=2)
    assert (outcome.wait(), pair.remote.answer(number)) == (None, None)
    assert memory == pattern(nbytes, 2)


def test_a_receive_that_was_cancelled_early_is_freed(pair: Pair) -> None:
    memory, outcome = bytearray(500_000), Outcome()
    tracked = TrackedMemory(memory)
    request = pair.ucx_transport.receive(pair.peer, tracked.memory, 12, outcome)
    pair.ucx_transport.cancel(request)
    assert isinstance(outcome.wait(), TimeoutError)
    until(tracked.is_free, "the memory is free")
    assert pair.stat("quarantined") == 0
    assert pair.remote.call("send", to=pair.me, nbytes=500_000, tag=12) is None
    until(lambda: pair.stat("stale") == 1, "the late message was counted")
    assert not any(memory)


def test_a_receive_that_was_posted_while_ucx_worked(pair: Pair) -> None:
    """Its message may arrive in the same round, and is not discarded."""
    pair.warm()
    ucx_transport, memory, outcome = pair.ucx_transport, bytearray(70_000), Outcome()
    worker = ucx_transport._open_worker()
    progress, requested = worker.progress, list[int]()

    def busy() -> None:
        progress()
        if not requested:
            ucx_transport.receive(pair.peer, memory, 14, outcome)
            requested.append(pair.remote.submit("send", to=pair.me, nbytes=len(memory), tag=14))
            deadline = time.monotonic() + PATIENCE
            while not worker._worker.tag_probe(*worker._any_tag, False).matched:
                assert time.monotonic() < deadline
                progress()

    worker.progress = busy
    ucx_transport._call(lambda: None)
    assert outcome.wait() is None
    assert pair.remote.answer(requested[0]) is None
    assert memory == pattern(len(memory), 1)
    assert pair.stat("stale") == 0
    worker.progress = progress


def test_a_second_receive_of_a_tag_is_refused(pair: Pair) -> None:
    first, second = Outcome(), Outcome()
    for outcome in (first, second):
        pair.ucx_transport.receive(pair.peer, bytearray(10), 13, outcome)
    assert isinstance(second.wait(), WireError)
    assert pair.remote.call("send", to=pair.me, nbytes=10, tag=13) is None
    assert first.wait() is None


def test_tags_differ_in_every_number_and_secret() -> None:
    secret = bytes(range(16))
    piece = (1, 2, 3, 4)
    changed = [(2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5), (2, 1, 3, 4)]
    # No number is truncated: a packed tag would be the same for these.
    changed += [
        (1 + 2**53, 2, 3, 4),
        (1, 2 + 2**53, 3, 4),
        (1, 2, 3 + 2**53, 4),
        (1, 2, 3, 4 + 2**53),
    ]
    every = {tag_of(secret, *numbers) for numbers in [piece, *changed]}
    assert len(every) == 1 + len(changed)
    assert tag_of(secret, *piece) == 0x6C02A20E20D7F0C9
    assert tag_of(os.urandom(SECRET_NBYTES), *piece) != tag_of(secret, *piece)
