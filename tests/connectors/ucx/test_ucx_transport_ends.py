"""How requests and transports end: killed and frozen peers, closing, leaks."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omni_kvlink import ClosedError, PeerLostError, UnavailableError, WireError
from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.connectors.ucx.transport import UcxTransport
from omni_kvlink.testing.rig import until
from support.faults.frozen import freeze

if importlib.util.find_spec("ucxx") is None:  # loading it would change every other test's process
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

from support.connectors.ucx_killed_process import PATIENCE, UcxProcess, pattern
from support.connectors.ucx_transports import BIG, Outcome, Pair, TrackedMemory
from support.connectors.ucx_transports import fresh_pair as fresh_pair
from support.connectors.ucx_transports import pair as pair
from support.connectors.ucx_transports import shared_process as shared_process

pytestmark = pytest.mark.usefixtures("leaves_nothing")


# Ends


def test_the_sender_is_killed(fresh_pair: Pair) -> None:
    memory = bytearray(100_000_000)
    outcome, _ = fresh_pair.fetch(memory, 20, then=signal.SIGKILL)
    fresh_pair.remote.process.wait(PATIENCE)
    assert isinstance(outcome.wait(), PeerLostError)
    late = Outcome()
    fresh_pair.ucx_transport.send(fresh_pair.peer, b"x", 21, late)
    assert isinstance(late.wait(), PeerLostError)
    assert fresh_pair.peer.error is not None
    until(lambda: fresh_pair.stat("quarantined") == 0, "UCX has freed it")


def test_the_sender_is_killed_while_bytes_come(fresh_pair: Pair) -> None:
    memory = bytearray(BIG)
    outcome, _ = fresh_pair.fetch(memory, 20, seed=5)
    until(lambda: memory[0] != 0 or memory[1] != 0, "the first bytes came")
    fresh_pair.remote.signal(signal.SIGKILL)
    fresh_pair.remote.process.wait(PATIENCE)
    error = outcome.wait()
    assert isinstance(error, PeerLostError) or memory == pattern(len(memory), 5)
    until(lambda: fresh_pair.stat("quarantined") == 0, "UCX has freed it")


def test_the_receiver_is_killed(fresh_pair: Pair) -> None:
    memory = pattern(100_000_000, 1)
    idle, waiting = Outcome(), Outcome()
    fresh_pair.ucx_transport.receive(fresh_pair.peer, bytearray(10), 22, waiting)
    freeze(fresh_pair.remote.process.pid)
    fresh_pair.ucx_transport.send(fresh_pair.peer, memory, 23, idle)
    until(lambda: fresh_pair.stat("active") == 1, "the send is on its way")
    fresh_pair.remote.signal(signal.SIGKILL)
    for outcome in (idle, waiting):
        assert isinstance(outcome.wait(), PeerLostError)
    until(lambda: fresh_pair.stat("quarantined") == 0, "UCX has freed it")


def test_a_frozen_sender(fresh_pair: Pair) -> None:
    """When it continues, its bytes arrive in the quarantined memory, which is not reused before."""
    memory = bytearray(BIG)
    tracked = TrackedMemory(memory)
    request, outcome, number = fresh_pair.freeze_amid(tracked.memory)
    fresh_pair.ucx_transport.cancel(request)
    assert isinstance(outcome.wait(), TimeoutError)
    assert fresh_pair.stat("quarantined") == 1
    assert fresh_pair.stat("quarantined_nbytes") == len(memory)
    assert not tracked.is_free()
    fresh_pair.remote.signal(signal.SIGCONT)
    assert fresh_pair.remote.answer(number) is None
    until(tracked.is_free, "UCX has freed it")
    assert fresh_pair.stat("quarantined") == 0
    assert memory == pattern(len(memory), 1)
    assert len(outcome.calls) == 1
    fresh_pair.warm()


def test_a_frozen_sender_is_disconnected(fresh_pair: Pair) -> None:
    """The memory is not free before the sender has continued: UCX would write there."""
    memory = bytearray(BIG)
    tracked = TrackedMemory(memory)
    _, outcome, number = fresh_pair.freeze_amid(tracked.memory)
    fresh_pair.ucx_transport.disconnect(fresh_pair.peer)
    assert isinstance(outcome.wait(), PeerLostError)
    for _ in range(3):  # in each round the transport could free it too early
        late = Outcome()
        fresh_pair.ucx_transport.send(fresh_pair.peer, b"x", 61, late)
        assert isinstance(late.wait(), PeerLostError)
    assert (fresh_pair.stat("quarantined"), tracked.is_free()) == (1, False)
    fresh_pair.remote.signal(signal.SIGCONT)
    fresh_pair.remote.answer(number)
    until(tracked.is_free, "UCX has freed it")


def test_close_with_requests_on_their_way(fresh_pair: Pair) -> None:
    memory, outcomes = bytearray(BIG), [Outcome(), Outcome()]
    tracked = TrackedMemory(memory)
    _, matched, _ = fresh_pair.freeze_amid(tracked.memory)
    fresh_pair.ucx_transport.receive(fresh_pair.peer, bytearray(10), 30, outcomes[0])
    fresh_pair.ucx_transport.send(fresh_pair.peer, bytearray(10), 31, outcomes[1])
    fresh_pair.ucx_transport.close()
    for outcome in (outcomes[0], matched):
        assert isinstance(outcome.wait(0), ClosedError)
    outcomes[1].wait(0)  # small enough to have left
    assert tracked.is_free()
    before = bytes(memory)
    fresh_pair.remote.signal(signal.SIGCONT)
    fresh_pair.remote.call("stats")
    assert memory == before
    with pytest.raises(ClosedError):
        fresh_pair.ucx_transport.send(fresh_pair.peer, b"x", 34, Outcome())
    fresh_pair.ucx_transport.close()


def test_the_address_of_a_closed_transport(shared_process: UcxProcess) -> None:
    closed = UcxTransport()
    closed.close()
    ucx_transport, outcome, answer = UcxTransport(), Outcome(), Outcome()
    peer = ucx_transport.connect(closed.address)
    ucx_transport.receive(peer, bytearray(10), 2, answer)
    ucx_transport.send(peer, bytearray(100_000), 1, outcome)
    assert isinstance(outcome.wait(), PeerLostError)
    assert isinstance(answer.wait(), PeerLostError)
    ucx_transport.close()


@pytest.mark.parametrize("what", ["empty", "noise", "cut", "flipped"])
def test_malformed_addresses(pair: Pair, what: str) -> None:
    address = bytearray(pair.ucx_transport.address)
    if what == "flipped":
        address[20] ^= 1
    bad = {"empty": b"", "noise": os.urandom(60), "cut": address[:-1], "flipped": address}[what]
    with pytest.raises(WireError):
        pair.ucx_transport.connect(bytes(bad))


# Rest


def test_an_idle_pair_sleeps(pair: Pair) -> None:
    pair.warm()
    seconds = 2.0
    mine, its = time.process_time(), pair.remote.call("cpu")
    time.sleep(seconds)
    assert time.process_time() - mine < 0.01 * seconds
    assert pair.remote.call("cpu") - its < 0.01 * seconds


def test_it_listens_on_loopback_alone(pair: Pair) -> None:
    stats = pair.ucx_transport.stats()
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
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match="nosuch"):
        UcxTransport(UcxSettings(devices="nosuch"))


def test_transports_leave_nothing_behind() -> None:
    def left() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(_links())

    def transfer() -> None:
        one, other, outcome = UcxTransport(), UcxTransport(), Outcome()
        memory = bytearray(99_999)
        other.receive(other.connect(one.address), memory, 1, outcome)
        one.send(one.connect(other.address), pattern(99_999, 1), 1, lambda error: None)
        assert outcome.wait() is None
        assert memory == pattern(99_999, 1)
        one.close()
        other.close()

    UcxTransport().close()
    before = left()
    for _ in range(5):
        transfer()
    until(
        lambda: all(now <= then for now, then in zip(left(), before, strict=True)),
        "threads and descriptors are gone",
    )


def test_a_process_that_does_not_close_exits_without_error() -> None:
    script = (
        "from omni_kvlink.connectors.ucx.transport import UcxTransport\n"
        "one, two = UcxTransport(), UcxTransport()\n"
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
