"""`ArenaPool.begin_prefault`: a thread maps memory before it is needed."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import CapacityError, ClosedError, TransferTimeout
from omni_kvlink.memory import arena
from omni_kvlink.memory import mapping as memory_mapping
from omni_kvlink.memory.arena import GRAIN, ArenaPool
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Reaches into _SHMEM_HUGE_PAGES: the kernel's setting is the machine's, and what
# the file has before it is touched is seen at that moment alone.


class SlowMemory:
    """Maps memory once `go` is set; `made` has the bytes of each arena."""

    def __init__(self) -> None:
        self.go, self.begun, self.made = threading.Event(), threading.Event(), list[int]()
        self.error: Exception | None = None

    def make(self, nbytes: int, is_wanted: Callable[[], bool]) -> Mapping:
        self.made.append(nbytes)
        self.begun.set()
        while not self.go.wait(0.01):
            if not is_wanted():
                raise ClosedError("not wanted")
        if self.error is not None:
            raise self.error
        return Mapping.anonymous(nbytes)


def pool(memory: SlowMemory, quota: int = 8 * GRAIN) -> ArenaPool:
    return ArenaPool(memory.make, quota, min_arena=0)


def test_what_is_reserved_meanwhile_waits_for_it() -> None:
    memory = SlowMemory()
    arenas, mapped = pool(memory), list[int]()
    arenas.begin_prefault(3 * GRAIN, mapped.append)
    assert memory.begun.wait(60)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(arenas.reserve, 2 * GRAIN, timeout=600)
        until(lambda: arenas.stats()["waiting"] or len(memory.made) > 1, "it waits, or maps")
        memory.go.set()
        assert waiting.result(60).arena == 0
    assert memory.made == [3 * GRAIN]
    until(lambda: mapped == [0], "the arena is reported")
    assert arenas.prefaulted == [0]
    found = arenas.stats()["prefault"]
    assert (found["requested"], found["mapped"], found["error"]) == (3 * GRAIN, 3 * GRAIN, "")


def test_what_does_not_fit_is_mapped_at_once() -> None:
    memory = SlowMemory()
    arenas = pool(memory)
    arenas.begin_prefault(GRAIN)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(arenas.reserve, 2 * GRAIN)
        until(lambda: sorted(memory.made) == [GRAIN, 2 * GRAIN], "both are being mapped")
        memory.go.set()
        waiting.result(60)


def test_a_timeout_ends_the_wait() -> None:
    """A call waits until then for memory that is mapped ahead; one that may not wait maps."""
    memory = SlowMemory()
    arenas = pool(memory)
    arenas.begin_prefault(3 * GRAIN)
    assert memory.begun.wait(60)
    with pytest.raises(TransferTimeout):
        arenas.reserve(2 * GRAIN, timeout=0.1)
    memory.made.clear()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(arenas.reserve, 2 * GRAIN)
        until(lambda: memory.made == [2 * GRAIN], "it maps memory of its own")
        memory.go.set()
        waiting.result(60)


def test_a_failure_is_logged_and_memory_is_mapped_when_it_is_needed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = SlowMemory()
    memory.error = CapacityError("none left", requested=GRAIN)
    arenas = pool(memory, 4 * GRAIN)
    with caplog.at_level(logging.WARNING, "omni_kvlink"), ThreadPoolExecutor() as threads:
        arenas.begin_prefault(4 * GRAIN)
        waiting = threads.submit(arenas.reserve, GRAIN, timeout=600)
        until(lambda: bool(arenas.stats()["waiting"]), "a thread waits")
        memory.go.set()
        with pytest.raises(CapacityError, match="none left"):
            waiting.result(60)
        until(lambda: "none left" in caplog.text, "the failure is logged")
    assert "none left" in arenas.stats()["prefault"]["error"]
    assert arenas.stats()["mapped"] == 0
    memory.error = None
    assert arenas.reserve(4 * GRAIN).nbytes == 4 * GRAIN


def test_closing_ends_it() -> None:
    memory = SlowMemory()
    arenas = pool(memory)
    arenas.begin_prefault(2 * GRAIN)
    assert memory.begun.wait(60)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(arenas.reserve, GRAIN, timeout=600)
        until(lambda: bool(arenas.stats()["waiting"]), "a thread waits")
        arenas.close()
        with pytest.raises(ClosedError):
            waiting.result(60)

    until(lambda: "kvlink-memory" not in names(), "the thread has ended")
    assert arenas.prefaulted == []


class Ahead:
    """A pool that maps its first arena of one page ahead, unasked."""

    def __init__(self, quota: int = 8 * GRAIN) -> None:
        self.memory, self.mapped, self.niceness = SlowMemory(), list[int](), list[int]()
        self.pool = ArenaPool(self.make, quota, min_arena=GRAIN)
        self.pool.begin_ahead(self.mapped.append)

    def make(self, nbytes: int, is_wanted: Callable[[], bool]) -> Mapping:
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return self.memory.make(nbytes, is_wanted)

    def end(self) -> dict[str, Any]:
        """Wait for the end of the thread; return what `stats` says of it."""
        until(lambda: "kvlink-memory" not in names(), "the thread has ended")
        found: dict[str, Any] = self.pool.stats()["prefault"]
        return found


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_the_first_arena_is_mapped_unasked_at_low_priority() -> None:
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    ahead = Ahead()
    ahead.memory.go.set()
    assert ahead.end()["mapped"] == GRAIN
    lower = min(usual + 10, 19)  # the system's lowest
    assert (ahead.mapped, ahead.pool.prefaulted, ahead.niceness) == ([0], [0], [lower])
    assert ahead.pool.reserve(GRAIN).arena == 0
    assert ahead.memory.made == [GRAIN]


@pytest.mark.parametrize("pages", [1, 8])
def test_nobody_waits_for_memory_that_nobody_asked_for(
    pages: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that needs memory earlier maps its own, of all the quota, too; the thread gives up."""
    ahead = Ahead()
    assert ahead.memory.begun.wait(60)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(ahead.pool.reserve, pages * GRAIN)
        until(lambda: len(ahead.memory.made) == 2, "it maps memory of its own")
        found = ahead.end()
        assert not waiting.done()
        ahead.memory.go.set()
        assert waiting.result(60).nbytes == pages * GRAIN
    assert ahead.memory.made == [GRAIN, pages * GRAIN]
    assert (found["requested"], found["mapped"], found["error"]) == (0, 0, "")
    assert (ahead.mapped, ahead.pool.stats()["mapped"]) == ([], pages * GRAIN)
    assert not caplog.text


def test_closing_ends_what_nobody_asked_for() -> None:
    ahead = Ahead()
    assert ahead.memory.begun.wait(60)
    ahead.pool.close()
    ahead.end()
    assert (ahead.mapped, ahead.pool.stats()["mapped"]) == ([], 0)


@pytest.mark.parametrize(("quota", "available"), [(7, 100), (8, 15)])
def test_nothing_is_mapped_unasked_where_memory_is_scarce(
    quota: int, available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "available_bytes", lambda: available * GRAIN)
    ahead = Ahead(quota * GRAIN)
    ahead.memory.go.set()
    assert ahead.end()["requested"] == 0
    assert ahead.memory.made == []


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise CapacityError(f"{nbytes} bytes", requested=nbytes)

    monkeypatch.setattr(arena, "check_available", refuse)
    with pytest.raises(CapacityError, match=str(2 * GRAIN)):
        pool(SlowMemory()).begin_prefault(2 * GRAIN)


def test_the_quota_bounds_it() -> None:
    memory = SlowMemory()
    memory.go.set()
    arenas = pool(memory, 2 * GRAIN)
    arenas.begin_prefault(100 * GRAIN)
    until(lambda: memory.made == [2 * GRAIN], "the arena is made")


def test_an_arena_that_is_dropped_is_not_passed_on() -> None:
    """Its memory is needed for a larger payload."""
    memory = SlowMemory()
    memory.go.set()
    arenas = pool(memory, 4 * GRAIN)
    arenas.begin_prefault(2 * GRAIN)
    until(lambda: arenas.prefaulted == [0], "the arena is mapped")
    assert arenas.reserve(4 * GRAIN).arena == 1
    assert arenas.prefaulted == []


def test_huge_pages_are_asked_for_before_the_file_has_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the kernel leaves it to the mapping; it decides, and the memory is complete."""
    setting = tmp_path / "shmem_enabled"
    touched = list[int]()
    inner = Mapping.populate

    def touch(mapping: Mapping, *arguments: Any, **options: Any) -> None:
        touched.append(os.fstat(mapping.fd).st_blocks * 512)
        inner(mapping, *arguments, **options)

    monkeypatch.setattr(Mapping, "populate", touch)
    monkeypatch.setattr(memory_mapping, "_SHMEM_HUGE_PAGES", setting)
    nbytes = 4 << 20
    for text, expected in (
        ("always [advise] never", [0, nbytes]),
        ("[never] advise", [nbytes]),
        ("", [nbytes]),
    ):
        touched.clear()
        setting.write_text(text)
        mapping = Mapping.shared("test", nbytes)
        assert touched == expected
        assert memory_mapping.is_sealed(mapping.fd)
        mapping.region.write(0, b"written")
