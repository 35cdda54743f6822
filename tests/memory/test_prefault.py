"""`ArenaPool.begin_prefault`: a thread maps memory before it is needed."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

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

# Reaches into _SHMEM_HUGE_PAGES, _touch_huge_pages: the kernel's setting is the machine's, and what
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

    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    until(lambda: "kvlink-memory" not in names(), "the thread has ended")
    assert arenas.prefaulted == []


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
    inner = Mapping._touch_huge_pages

    def touch(mapping: Mapping, is_wanted: Callable[[], bool]) -> None:
        touched.append(os.fstat(mapping.fd).st_blocks)
        inner(mapping, is_wanted)

    monkeypatch.setattr(Mapping, "_touch_huge_pages", touch)
    monkeypatch.setattr(memory_mapping, "_SHMEM_HUGE_PAGES", setting)
    for text, expected in (("always [advise] never", [0]), ("[never] advise", [0]), ("", [0])):
        setting.write_text(text)
        mapping = Mapping.shared("test", 4 << 20)
        assert touched == expected
        assert memory_mapping.is_sealed(mapping.fd)
        mapping.region.write(0, b"written")
