"""A reader of `kept.py`, a process of its own: the commands that it runs, one after the other."""

from __future__ import annotations

import gc
import hashlib
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omni_kvlink import KVLink, TensorTransferData
from omni_kvlink.bench.payloads import bytes_of
from omni_kvlink.bench.reader import freeze_gc
from omni_kvlink.testing.peer_harness import CommandSet, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink import KVConsumer, Received

TIMEOUT = 120.0
NAME = "page"
"""The one tensor of a page."""
CALLS = ("contains", "copy", "get", "page", "batch")
BLOCKS = 64
"""Blocks of the pool that a reader copies pages into, as an engine's are."""


def page_bytes(nbytes: int) -> torch.Tensor:
    """The bytes of all pages, but for the first eight, which have the page's number."""
    return torch.randint(0, 256, (nbytes,), generator=_seeded(), dtype=torch.uint8)


def number_page(page: torch.Tensor, number: int) -> None:
    """Make it the page of this number."""
    page[:8].copy_(torch.from_numpy(np.array([number], np.int64).view(np.uint8)))


def keys_of(numbers: Sequence[int]) -> list[str]:
    """The keys of pages, as long as those of a cache of prompts."""
    return [f"kept/{number:032x}" for number in numbers]


def memory_of(pid: int | str) -> dict[str, int]:
    """Bytes of a process: its share of all it maps (`pss`), and what only it has (`private`)."""
    found = {"pss": 0, "private": 0}
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name == "Pss":
                found["pss"] += 1024 * int(rest.split()[0])
            elif name in ("Private_Clean", "Private_Dirty"):
                found["private"] += 1024 * int(rest.split()[0])
    return found


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class KeptReader(CommandSet):
    """The commands of a reader; it has links by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self._links: dict[str, KVConsumer] = {}
        self._held: list[Received] = []
        self._random = random.Random(3)
        self._pages: PagePool | None = None

    def connect(self, link: str, url: str) -> None:
        """Connect to a producer."""
        self._links[link] = KVLink.connect(url, timeout=TIMEOUT)

    def touch(self, link: str) -> None:
        """Wait until all that is mapped has been touched, as it is when nobody hurries."""
        time.sleep(0.02)  # it may not be mapped yet
        while (mapped := self._links[link].stats()["mapped"])["touched"] < mapped["nbytes"]:
            time.sleep(0.01)

    def disconnect(self, link: str) -> None:
        """Close a link."""
        self._links.pop(link).close()

    def get(self, link: str, key: str) -> float:
        """Get a payload and hold it; the seconds until there are views of every tensor."""
        called = time.perf_counter()
        received = self._links[link].get(key, timeout=TIMEOUT, wait=False)
        received.data.tensors()
        spent = time.perf_counter() - called
        self._held.append(received)
        return spent

    def digest(self) -> str:
        """SHA-256 of the bytes of what is held last, read where they lie."""
        found = hashlib.sha256()
        for tensor in self._held[-1].data.tensors():
            assert isinstance(tensor, torch.Tensor)
            found.update(bytes_of(tensor).data)
        return found.hexdigest()

    def release(self) -> None:
        """Release all that is held."""
        while self._held:
            self._held.pop().release()

    def memory(self) -> dict[str, int]:
        """See `memory_of`."""
        gc.collect()
        return memory_of("self")

    def open_pages(self, nbytes: int) -> None:
        """Make the pool for pages of so many bytes."""
        self._pages = PagePool(nbytes)

    def warm(self, link: str, count: int, batch: int) -> None:
        """Get each page once, so that all memory is mapped, and have that be touched."""
        consumer = self._links[link]
        for start in range(0, count, batch):
            keys = keys_of(range(start, min(count, start + batch)))
            with consumer.get_many(keys, timeout=TIMEOUT, wait=False):
                pass
        self.touch(link)

    def freeze(self) -> None:
        """See `freeze_gc`."""
        freeze_gc()

    def measure(
        self, counts: dict[str, int], gets: int, batch: int, num_keys: int
    ) -> dict[str, Any]:
        """Seconds of each call by link, of which each keeps so many pages; how many were wrong.

        The links take turns call by call, each first as often as the other.
        """
        assert self._pages is not None
        links = list(counts)
        seconds = {link: {name: list[float]() for name in CALLS} for link in links}
        wrong = 0
        for turn in range(gets):
            for link in links if turn % 2 else links[::-1]:
                wrong += self._measure_one(link, counts[link], num_keys, seconds[link])
        for turn in range(max(2, gets // batch)):
            for link in links if turn % 2 else links[::-1]:
                numbers = self._random.sample(range(counts[link]), min(batch, counts[link]))
                spent = self._pages.read_batch(self._links[link], numbers)
                seconds[link]["batch"].append(spent / len(numbers))
        wrong, self._pages.wrong = wrong + self._pages.wrong, 0
        return {"seconds": seconds, "wrong": wrong}

    def _measure_one(
        self, link: str, count: int, num_keys: int, seconds: dict[str, list[float]]
    ) -> int:
        """Add the seconds of one call of each kind; return the keys that were not there."""
        assert self._pages is not None
        consumer, keys = self._links[link], keys_of(self._random.choices(range(count), k=num_keys))
        called = time.perf_counter()
        found = consumer.contains(keys, timeout=TIMEOUT)
        seconds["contains"].append(time.perf_counter() - called)
        one, other = self._random.choices(range(count), k=2)
        seconds["copy"].append(self._pages.copy(consumer, one))
        got, whole = self._pages.read(consumer, other)
        seconds["get"].append(got)
        seconds["page"].append(whole)
        return found.count(False)

    def close_all(self) -> None:
        """Close the links."""
        self.release()
        for link in self._links.values():
            link.close()


class PagePool:
    """A pool of blocks, the bytes that pages have, and the ways to fill a block with a page.

    Each call compares its blocks with those bytes after the clock has stopped; `wrong` counts.
    """

    def __init__(self, nbytes: int):
        self._pool = torch.zeros(BLOCKS, nbytes, dtype=torch.uint8)
        self._bytes, self._next, self.wrong = page_bytes(nbytes), 0, 0

    def copy(self, consumer: KVConsumer, number: int) -> float:
        """Copy a page plainly: its views are there before the clock starts, its bytes unread."""
        [key], block = keys_of([number]), self._block()
        with consumer.get(key, timeout=TIMEOUT, wait=False) as data:
            assert isinstance(data, TensorTransferData)
            page = data[NAME]
            assert isinstance(page, torch.Tensor)
            source, target = bytes_of(page), block.numpy()
            called = time.perf_counter()
            np.copyto(target, source)
            spent = time.perf_counter() - called
        self._check(block, number)
        return spent

    def read(self, consumer: KVConsumer, number: int) -> tuple[float, float]:
        """Get a page, scatter and release it; the seconds until its views, and of all."""
        [key], block = keys_of([number]), self._block()
        called = time.perf_counter()
        received = consumer.get(key, timeout=TIMEOUT, wait=False)
        got = time.perf_counter()
        received.scatter([block])
        received.release()
        ended = time.perf_counter()
        self._check(block, number)
        return got - called, ended - called

    def read_batch(self, consumer: KVConsumer, numbers: Sequence[int]) -> float:
        """Get pages together, scatter and release them; the seconds of all."""
        keys, blocks = keys_of(numbers), [self._block() for _ in numbers]
        called = time.perf_counter()
        batch = consumer.get_many(keys, timeout=TIMEOUT, wait=False)
        batch.scatter([[block] for block in blocks])
        batch.release()
        spent = time.perf_counter() - called
        for number, block in zip(numbers[-BLOCKS:], blocks[-BLOCKS:], strict=True):
            self._check(block, number)
        return spent

    def _block(self) -> torch.Tensor:
        self._next = (self._next + 1) % BLOCKS
        return self._pool[self._next]

    def _check(self, block: torch.Tensor, number: int) -> None:
        number_page(self._bytes, number)
        self.wrong += not torch.equal(block, self._bytes)


def main() -> None:
    """Serve commands until standard input ends."""
    commands = KeptReader()
    try:
        serve(commands, concurrent=False)
    finally:
        commands.close_all()


if __name__ == "__main__":
    main()
