"""The UCX plane between two real processes: exact bytes, or one error, and nothing left."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_kvlink import ClosedError, PeerLostError, UnavailableError, WireError
from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.ucx.plane import Endpoint, Plane, Request
from omni_kvlink.connectors.ucx.settings import Settings
from omni_kvlink.connectors.ucx.tags import Tags
from omni_kvlink.memory import Mapping
from omni_kvlink.testing.rig import until

if importlib.util.find_spec("ucxx") is None:  # loading it would change every other test's process
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

from ucx_victim import PATIENCE, Victim, pattern

pytestmark = pytest.mark.usefixtures("leaves_nothing")
BIG = 235_000_000
CLOSED = 2.5
NOTICED = 1.0
"""Seconds from a peer's end to every request's error; on loopback it takes a millisecond."""


class Outcome:
    """What `done` was told; a second call is an error of its own."""

    def __init__(self) -> None:
        self.calls: list[BaseException | None] = []
        self.threads: list[str] = []
        self._event = threading.Event()

    def __call__(self, error: BaseException | None) -> None:
        self.calls.append(error)
        self.threads.append(threading.current_thread().name)
        self._event.set()

    def ended(self, timeout: float) -> bool:
        return self._event.wait(timeout)

    def wait(self, timeout: float = PATIENCE) -> BaseException | None:
        assert self._event.wait(timeout), "the request is not over"
        assert len(self.calls) == 1
        return self.calls[0]


class Pair:
    """A plane here, connected to a victim's."""

    def __init__(self, victim: Victim):
        self.victim, self.plane = victim, Plane()
        self.me = self.plane.address.hex()
        self.peer: Endpoint = self.plane.connect(
            bytes.fromhex(victim.do("connect", address=self.me))
        )

    def fetch(self, memory: Any, tag: int, **how: Any) -> tuple[Outcome, int]:
        """Receive `memory` from the victim, which is asked once the receive waits."""
        outcome = Outcome()
        self.plane.receive(self.peer, memory, tag, outcome)
        how.setdefault("nbytes", len(memory))
        return outcome, self.victim.ask("send", to=self.me, tag=tag, **how)

    def push(self, memory: Any, tag: int, **how: Any) -> tuple[Outcome, int]:
        """Send `memory` to the victim, which waits for it."""
        outcome = Outcome()
        how.setdefault("nbytes", len(memory))
        number = self.victim.ask("receive", to=self.me, tag=tag, **how)
        assert self.victim.answer(number) == "waiting"
        self.plane.send(self.peer, memory, tag, outcome)
        return outcome, -number

    def warm(self) -> None:
        """Connected both ways: the next message leaves when it is sent, also a long one's offer."""
        for way in (self.fetch, self.push):
            outcome, number = way(pattern(100_000, 1), 1)
            assert (outcome.wait(), self.victim.answer(number)) == (None, None)

    def freeze_amid(self, memory: Any) -> tuple[Request, Outcome, int]:
        """Stop the victim when it has sent a part of `memory`."""
        for tag in range(50, 60):
            outcome = Outcome()
            request = self.plane.receive(self.peer, memory, tag, outcome)
            number = self.victim.ask("send", to=self.me, nbytes=len(memory), tag=tag)
            until(lambda it=outcome: self.stat("active") == 1 or it.calls, "it was matched")
            self.victim.signal(signal.SIGSTOP)
            if not outcome.ended(0.3):  # what is in the sockets comes all the same
                return request, outcome, number
            self.victim.signal(signal.SIGCONT)
        raise AssertionError("the victim could not be stopped in time")

    def stat(self, name: str) -> int:
        return int(self.plane.stats()[name])

    def close(self) -> None:
        self.plane.close()


@pytest.fixture(scope="module")
def bystander() -> Iterator[Victim]:
    """A victim that is never hurt."""
    victim = Victim()
    yield victim
    victim.end()


@pytest.fixture
def pair(bystander: Victim) -> Iterator[Pair]:
    pair = Pair(bystander)
    yield pair
    pair.close()


@pytest.fixture
def doomed() -> Iterator[Pair]:
    victim = Victim()
    pair = Pair(victim)
    pair.warm()
    yield pair
    pair.close()
    victim.end()


# Bytes


@pytest.mark.parametrize(
    "nbytes", [0, 1, 8191, 8193, 12_345, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 1_000_003]
)
def test_every_byte_arrives_both_ways(pair: Pair, nbytes: int) -> None:
    memory = bytearray(nbytes)
    outcome, number = pair.fetch(memory, 7, seed=nbytes)
    assert (outcome.wait(), pair.victim.answer(number)) == (None, None)
    assert memory == pattern(nbytes, nbytes)
    outcome, number = pair.push(memory, 8, seed=nbytes)
    assert (outcome.wait(), pair.victim.answer(number)) == (None, None)
    assert outcome.threads == ["kvlink-ucx"]


def test_a_whole_cache_in_one_message_into_an_arena(pair: Pair) -> None:
    nbytes = BIG
    region = Mapping.anonymous(nbytes + 1).region
    region.view()[-1] = 0x5A
    outcome = Outcome()
    pair.plane.receive(pair.peer, region.slice(0, nbytes), 9, outcome)
    number = pair.victim.ask("send", to=pair.me, nbytes=nbytes, tag=9, seed=3)
    assert (outcome.wait(), pair.victim.answer(number)) == (None, None)
    assert region.view()[:nbytes] == pattern(nbytes, 3)
    assert region.view()[-1] == 0x5A


def test_readonly_memory_can_be_sent(pair: Pair) -> None:
    source = memoryview(bytes(pattern(70_000, 4)))
    outcome, number = pair.push(source, 10, seed=4)
    assert (outcome.wait(), pair.victim.answer(number)) == (None, None)


def test_memory_with_gaps_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="gaps"):
        pair.plane.send(pair.peer, memoryview(bytearray(10))[::2], 1, Outcome())


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
        assert (outcome.wait(), pair.victim.answer(number)) == (None, None)
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
    assert pair.victim.answer(number) is None  # the sender's memory is not kept
    assert not any(memory)
    pair.warm()


@pytest.mark.parametrize("nbytes", [0, 5000, 500_000])
def test_a_message_that_nobody_waits_for_is_thrown_away(pair: Pair, nbytes: int) -> None:
    secret = Tags.new()
    old, new = (secret.of(1, epoch, 0, nbytes) for epoch in (1, 2))
    memory = bytearray(nbytes)
    outcome = Outcome()
    pair.plane.receive(pair.peer, memory, new, outcome)
    stale = pair.victim.ask("send", to=pair.me, nbytes=nbytes, tag=old, seed=1)
    assert pair.victim.answer(stale) is None
    until(lambda: pair.stat("stale") == 1, "the stale message was counted")
    assert not any(memory)
    assert outcome.calls == []
    number = pair.victim.ask("send", to=pair.me, nbytes=nbytes, tag=new, seed=2)
    assert (outcome.wait(), pair.victim.answer(number)) == (None, None)
    assert memory == pattern(nbytes, 2)


def test_a_receive_that_was_abandoned_early_is_gone(pair: Pair) -> None:
    memory, outcome = bytearray(500_000), Outcome()
    gone = Marked(memory)
    request = pair.plane.receive(pair.peer, gone.memory, 12, outcome)
    pair.plane.abandon(request)
    assert isinstance(outcome.wait(), TimeoutError)
    until(gone.is_free, "the memory is free")
    assert pair.stat("quarantined") == 0
    assert pair.victim.do("send", to=pair.me, nbytes=500_000, tag=12) is None
    until(lambda: pair.stat("stale") == 1, "the late message was counted")
    assert not any(memory)


def test_a_receive_that_was_asked_for_while_ucx_worked(pair: Pair) -> None:
    """Its message may come in the same turn, and is not thrown away."""
    pair.warm()
    plane, memory, outcome = pair.plane, bytearray(70_000), Outcome()
    worker = plane._must()
    progress, asked = worker.progress, list[int]()

    def busy() -> None:
        progress()
        if not asked:
            plane.receive(pair.peer, memory, 14, outcome)
            asked.append(pair.victim.ask("send", to=pair.me, nbytes=len(memory), tag=14))
            deadline = time.monotonic() + PATIENCE
            while not worker._worker.tag_probe(*worker._any, False).matched:
                assert time.monotonic() < deadline
                progress()

    worker.progress = busy  # type: ignore[method-assign]
    plane._call(lambda: None)
    assert outcome.wait() is None
    assert pair.victim.answer(asked[0]) is None
    assert memory == pattern(len(memory), 1)
    assert pair.stat("stale") == 0
    worker.progress = progress  # type: ignore[method-assign]


def test_a_tag_is_waited_for_once(pair: Pair) -> None:
    first, second = Outcome(), Outcome()
    for outcome in (first, second):
        pair.plane.receive(pair.peer, bytearray(10), 13, outcome)
    assert isinstance(second.wait(), WireError)
    assert pair.victim.do("send", to=pair.me, nbytes=10, tag=13) is None
    assert first.wait() is None


def test_tags_differ_in_every_number_and_secret() -> None:
    tags = Tags(bytes(range(16)))
    piece = (1, 2, 3, 4)
    changed = [(2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5), (2, 1, 3, 4)]
    # No number is cut: a packed tag would take these for the same piece.
    changed += [tuple(n + (bits == i) * 2**53 for i, n in enumerate(piece)) for bits in range(4)]
    every = {tags.of(*numbers) for numbers in [piece, *changed]}
    assert len(every) == 1 + len(changed)
    assert tags.of(*piece) == Tags(bytes(range(16))).of(*piece) == 0x6C02A20E20D7F0C9
    assert Tags.new().of(*piece) != tags.of(*piece)
    with pytest.raises(ValueError, match="secret"):
        Tags(b"short")


# Ends


class Marked:
    """Memory that says when the last reference to it is gone."""

    def __init__(self, memory: bytearray):
        import ctypes

        self.memory: Any = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._alive = weakref.ref(self.memory)

    def is_free(self) -> bool:
        self.memory = None
        return self._alive() is None


def test_the_sender_is_killed(doomed: Pair) -> None:
    memory = bytearray(100_000_000)
    outcome, _ = doomed.fetch(memory, 20, then=signal.SIGKILL)
    doomed.victim.process.wait(PATIENCE)
    assert isinstance(outcome.wait(NOTICED), PeerLostError)
    late = Outcome()
    doomed.plane.send(doomed.peer, b"x", 21, late)
    assert isinstance(late.wait(), PeerLostError)
    assert not doomed.peer.alive
    until(lambda: doomed.stat("quarantined") == 0, "UCX let go")


def test_the_sender_is_killed_while_bytes_come(doomed: Pair) -> None:
    memory = bytearray(BIG)
    outcome, _ = doomed.fetch(memory, 20, seed=5)
    until(lambda: memory[0] != 0 or memory[1] != 0, "the first bytes came")
    doomed.victim.signal(signal.SIGKILL)
    doomed.victim.process.wait(PATIENCE)
    error = outcome.wait(NOTICED)
    assert isinstance(error, PeerLostError) or memory == pattern(len(memory), 5)
    until(lambda: doomed.stat("quarantined") == 0, "UCX let go")


def test_the_receiver_is_killed(doomed: Pair) -> None:
    memory = pattern(100_000_000, 1)
    idle, waiting = Outcome(), Outcome()
    doomed.plane.receive(doomed.peer, bytearray(10), 22, waiting)
    doomed.victim.signal(signal.SIGSTOP)
    doomed.plane.send(doomed.peer, memory, 23, idle)
    until(lambda: doomed.stat("active") == 1, "the send is on its way")
    doomed.victim.signal(signal.SIGKILL)
    for outcome in (idle, waiting):
        assert isinstance(outcome.wait(NOTICED), PeerLostError)
    until(lambda: doomed.stat("quarantined") == 0, "UCX let go")


def test_a_frozen_sender(doomed: Pair) -> None:
    """What it sends when it goes on lands where it was meant to, which nobody uses meanwhile."""
    memory = bytearray(BIG)
    kept = Marked(memory)
    request, outcome, number = doomed.freeze_amid(kept.memory)
    doomed.plane.abandon(request)
    assert isinstance(outcome.wait(), TimeoutError)
    assert doomed.stat("quarantined") == 1
    assert doomed.stat("quarantined_nbytes") == len(memory)
    assert not kept.is_free()
    doomed.victim.signal(signal.SIGCONT)
    assert doomed.victim.answer(number) is None
    until(kept.is_free, "UCX let go")
    assert doomed.stat("quarantined") == 0
    assert memory == pattern(len(memory), 1)
    assert len(outcome.calls) == 1
    doomed.warm()


def test_a_frozen_sender_is_disconnected(doomed: Pair) -> None:
    """Its memory is not free before it has gone on: UCX would write there."""
    memory = bytearray(BIG)
    kept = Marked(memory)
    _, outcome, number = doomed.freeze_amid(kept.memory)
    doomed.plane.disconnect(doomed.peer)
    assert isinstance(outcome.wait(NOTICED), PeerLostError)
    for _ in range(3):  # each a turn of the plane, in which it could let go too early
        late = Outcome()
        doomed.plane.send(doomed.peer, b"x", 61, late)
        assert isinstance(late.wait(), PeerLostError)
    assert (doomed.stat("quarantined"), kept.is_free()) == (1, False)
    doomed.victim.signal(signal.SIGCONT)
    doomed.victim.answer(number)
    until(kept.is_free, "UCX let go")


def test_close_with_requests_on_their_way(doomed: Pair) -> None:
    memory, outcomes = bytearray(BIG), [Outcome(), Outcome()]
    kept = Marked(memory)
    _, matched, _ = doomed.freeze_amid(kept.memory)
    doomed.plane.receive(doomed.peer, bytearray(10), 30, outcomes[0])
    doomed.plane.send(doomed.peer, bytearray(10), 31, outcomes[1])
    started = time.monotonic()
    doomed.plane.close()
    assert time.monotonic() - started < CLOSED
    for outcome in (outcomes[0], matched):
        assert isinstance(outcome.wait(0), ClosedError)
    outcomes[1].wait(0)  # small enough to have left
    assert kept.is_free()
    before = bytes(memory)
    doomed.victim.signal(signal.SIGCONT)
    doomed.victim.do("stats")
    assert memory == before
    with pytest.raises(ClosedError):
        doomed.plane.send(doomed.peer, b"x", 34, Outcome())
    doomed.plane.close()


def test_an_address_where_nobody_is(bystander: Victim) -> None:
    gone = Plane()
    gone.close()
    plane, outcome, answer = Plane(), Outcome(), Outcome()
    peer = plane.connect(gone.address)
    plane.receive(peer, bytearray(10), 2, answer)
    plane.send(peer, bytearray(100_000), 1, outcome)
    assert isinstance(outcome.wait(), PeerLostError)
    assert isinstance(answer.wait(), PeerLostError)
    plane.close()


@pytest.mark.parametrize("what", ["empty", "noise", "cut", "flipped"])
def test_an_address_that_is_none(pair: Pair, what: str) -> None:
    address = bytearray(pair.plane.address)
    if what == "flipped":
        address[20] ^= 1
    bad = {"empty": b"", "noise": os.urandom(60), "cut": address[:-1], "flipped": address}[what]
    with pytest.raises(WireError):
        pair.plane.connect(bytes(bad))


# Rest


def test_an_idle_pair_sleeps(pair: Pair) -> None:
    pair.warm()
    seconds = 2.0
    mine, its = time.process_time(), pair.victim.do("cpu")
    time.sleep(seconds)
    assert time.process_time() - mine < 0.01 * seconds
    assert pair.victim.do("cpu") - its < 0.01 * seconds


def test_it_listens_on_loopback_alone(pair: Pair) -> None:
    stats = pair.plane.stats()
    assert stats["devices"] == ["tcp/lo"]
    listening = {
        line.split()[1].split(":")[0]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in _links()
    }
    assert listening == {"0100007F"}  # 127.0.0.1


def _links() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return found


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match="nosuch"):
        Plane(Settings(devices="nosuch"))


def test_planes_leave_nothing_behind() -> None:
    def left() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(_links())

    def live() -> None:
        one, other, outcome = Plane(), Plane(), Outcome()
        memory = bytearray(99_999)
        other.receive(other.connect(one.address), memory, 1, outcome)
        one.send(one.connect(other.address), pattern(99_999, 1), 1, lambda error: None)
        assert outcome.wait() is None
        assert memory == pattern(99_999, 1)
        one.close(), other.close()

    Plane().close()
    before = left()
    for _ in range(5):
        live()
    until(
        lambda: all(now <= then for now, then in zip(left(), before, strict=True)),
        "threads and descriptors are gone",
    )


def test_a_process_that_forgets_to_close_ends_well() -> None:
    script = (
        "from omni_kvlink.connectors.ucx.plane import Plane\n"
        "one, two = Plane(), Plane()\n"
        "one.send(one.connect(two.address), bytearray(1000000), 1, lambda error: None)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=PATIENCE, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_missing_ucxx_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ucxx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ucxx", None)
    reason = ucx.unavailable()
    assert reason is not None
    assert "pip install 'omni-kvlink[ucx]'" in reason
