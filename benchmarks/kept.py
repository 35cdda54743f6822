"""The cost of kept payloads over shared memory: for many readers of one, and of many pages.

    python benchmarks/kept.py [--readers 8] [--pages 10000] [--page-bytes 2000000] [--few 100]
                              [--rounds 10] [--json FILE]

One large payload is kept and read by `--readers` processes at once: what memory of the machine and
of each process it takes, and how long the last reader waits for its views. Then `--pages` pages are
kept by one link and `--few` by another of the same process: what `contains` and a page's get cost a
reader in another process, beside a plain copy of the page, and whether any call takes longer, or
any page more memory, where more are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from kept_reader import NAME, TIMEOUT, keys_of, memory_of, number_page, page_bytes

from omni_kvlink import KVLink, TensorTransferData
from omni_kvlink.bench.commands import add_options, run_setup
from omni_kvlink.bench.machine import load_line
from omni_kvlink.bench.payloads import bytes_of, make_sample
from omni_kvlink.bench.reader import freeze_gc
from omni_kvlink.bench.report import BenchError, row
from omni_kvlink.bench.result import Result
from omni_kvlink.bench.setups import PRESETS, Shape, option
from omni_kvlink.bench.stats import Summary, Timings
from omni_kvlink.cli.arguments import COUNT, NumberArgument, Parser
from omni_kvlink.cli.process import run_guarded
from omni_kvlink.cli.terminal import Progress, progress, table
from omni_kvlink.memory.arena import MIN_ARENA
from omni_kvlink.memory.mapping import available_bytes
from omni_kvlink.testing.peer_harness import PeerError, PeerExited, ProcessPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink import KVProducer
    from omni_kvlink.bench.result import Bars

KEY, EXTRA = "kept/payload", "kept/one more"
ASKED = 256
"""Keys of one `contains`."""
SPARE = 8
"""Pages for which each link has memory beside those that are kept."""
_SLOT_SPACE = 8 << 10
_RESERVE = 1 << 30
"""Bytes of the machine's memory that are left to others."""
GROWTH = ("get", "batch", "contains", "put", "withdraw", "stats")
"""The calls that must not take longer where more is kept."""
_TEXTS = {
    "copy": "a page copied plainly into a block, out of its views, which are there",
    "get": "get called, until the page's views",
    "page": "get, scatter into a block with every digest checked, release",
    "batch": "the same, of pages that are got together, a page",
    "contains": f"contains of {ASKED} keys",
    "put": "put of one more page",
    "withdraw": "withdraw of it",
    "stats": "stats of the producer",
}
_BYTES = NumberArgument("a multiple of 64", 64, step=64, metavar="BYTES")


@dataclasses.dataclass(frozen=True)
class KeptSetup:
    """`readers` of one payload of a shape; `pages` and `few` pages. 0 leaves either out."""

    presets: ClassVar = tuple(PRESETS)

    shape: Shape
    readers: int = option(8, "measurement", "processes that read the one payload", COUNT)
    pages: int = option(10000, "measurement", "pages that one link keeps", COUNT)
    few: int = option(100, "measurement", "pages that the other link keeps, to compare")
    page_bytes: int = option(2_000_000, "measurement", "bytes of a page", _BYTES)
    batch: int = option(64, "measurement", "pages of one get_many")
    gets: int = option(64, "measurement", "calls of each kind, in each round")
    rounds: int = option(10, "measurement", "rounds, whose medians are compared")

    def quota(self, pages: int) -> int:
        """Bytes of memory for so many pages and those beside them, which lie in arenas."""
        slot = self.page_bytes + _SLOT_SPACE
        return MIN_ARENA * (2 + (pages + SPARE) // max(1, MIN_ARENA // slot))

    @property
    def needed(self) -> int:
        """Bytes of memory that all of it takes, at most."""
        pages = self.quota(self.pages) + self.quota(self.few) if self.pages else 0
        return max(pages, 3 * self.shape.nbytes if self.readers else 0) + _RESERVE


class Shared(NamedTuple):
    """What one payload for many readers took: bytes, and the seconds of the last reader's gets."""

    machine: dict[str, int]
    producer: dict[str, int]
    readers: list[dict[str, int]]
    seconds: Timings
    differing: int

    @property
    def pss(self) -> int:
        """The bytes by which the memory of all processes has grown, shared pages counted once."""
        return self.producer["pss"] + sum(reader["pss"] for reader in self.readers)


class Kept(NamedTuple):
    """What kept pages took: the seconds of each call, by link and by round; bytes, wrong pages."""

    seconds: dict[str, Timings]
    bookkeeping: dict[str, float]
    wrong: int

    def growth(self, call: str) -> Summary:
        """The seconds of a call where many are kept, by those where few are, round by round."""
        pairs = zip(self.seconds["many"][call], self.seconds["few"][call], strict=True)
        return Summary.of([many / few for many, few in pairs])


def measure(setup: KeptSetup, progress: Progress = progress) -> Result:
    """Measure the one payload, then the pages; `BenchError` if the memory does not suffice."""
    if setup.needed > (free := available_bytes()):
        raise BenchError(
            f"{setup.pages} pages of {setup.page_bytes} bytes and all beside them take up to "
            f"{setup.needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are available: "
            "give fewer --pages, or smaller ones by --page-bytes"
        )
    torch.set_num_threads(1)
    shared = measure_readers(setup, progress) if setup.readers else None
    kept = measure_pages(setup, progress) if setup.pages else None
    return result_of(setup, shared, kept)


def measure_readers(setup: KeptSetup, progress: Progress) -> Shared:
    """Keep one payload, and have all readers hold it at once."""
    sample = make_sample(KEY, setup.shape, np.random.default_rng(0))
    digest = hashlib.sha256()
    for tensor in sample.cache.tensors():
        assert isinstance(tensor, torch.Tensor)
        digest.update(bytes_of(tensor).data)
    seconds: dict[str, list[float]] = {"first": [], "again": []}
    with contextlib.ExitStack() as opened, progress("gets", setup.readers + setup.rounds) as step:
        quota = 2 * setup.shape.nbytes + MIN_ARENA
        link = opened.enter_context(KVLink.serve(_url("payload"), quota=quota))
        readers = [opened.enter_context(_reader()) for _ in range(setup.readers)]
        for reader in readers:
            reader.call("connect", link="kept", url=link.url)
        before = _machine(), _own_memory(), [reader.call("memory") for reader in readers]
        link.put(sample.cache, readers=None)
        differing = 0
        for reader in readers:
            reader.call("get", link="kept", key=KEY)
            differing += reader.call("digest") != digest.hexdigest()
            step()
        after = _machine(), _own_memory(), [reader.call("memory") for reader in readers]
        last = readers[-1]
        for _ in range(setup.rounds):
            last.call("release")
            seconds["again"].append(last.call("get", link="kept", key=KEY))
            last.call("release")
            last.call("connect", link="new", url=link.url)
            last.call("touch", link="new")
            seconds["first"].append(last.call("get", link="new", key=KEY))
            last.call("release")
            last.call("disconnect", link="new")
            step()
    grown = [_less(there, here) for there, here in zip(after[2], before[2], strict=True)]
    own, machine = _less(after[1], before[1]), _less(after[0], before[0])
    return Shared(machine, own, grown, Timings(seconds), differing)


def measure_pages(setup: KeptSetup, progress: Progress) -> Kept:
    """Keep many pages at one link and few at another, and measure both in turn."""
    seconds = {side: Timings({name: [] for name in _TEXTS}) for side in ("few", "many")}
    counts, wrong = {"few": setup.few, "many": setup.pages}, 0
    page, bookkeeping = page_bytes(setup.page_bytes), dict[str, float]()
    with contextlib.ExitStack() as opened, progress("pages", sum(counts.values())) as step:
        reader = opened.enter_context(_reader())
        reader.call("open_pages", nbytes=setup.page_bytes)
        links: dict[str, KVProducer] = {}
        for side, count in counts.items():
            quota = setup.quota(count)
            link = links[side] = opened.enter_context(KVLink.serve(_url(side), quota=quota))
            bookkeeping[side] = _keep(link, page, count, step)
            reader.call("connect", link=side, url=link.url)
            reader.submit("warm", link=side, count=count, batch=setup.batch).result(10 * TIMEOUT)
        freeze_gc()
        reader.call("freeze")
        step = opened.enter_context(progress("rounds", setup.rounds + 1))
        for number in range(setup.rounds + 1):
            measured = _round(setup, links, reader, counts, page)
            wrong += measured["wrong"]
            for side in links if number else ():  # the first round is to warm up
                for name, values in measured["seconds"][side].items():
                    seconds[side][name].append(Summary.of(values).p50)
            step()
    return Kept(seconds, bookkeeping, wrong)


def _keep(link: KVProducer, page: torch.Tensor, count: int, step: Callable[[], None]) -> float:
    """Keep pages; return the private bytes of this process that each takes."""
    gc.collect()
    before = _anonymous()
    for number, key in enumerate(keys_of(range(count))):
        number_page(page, number)
        link.put(TensorTransferData(key, {NAME: page}), readers=None)
        step()
    gc.collect()
    return (_anonymous() - before) / count


def _round(
    setup: KeptSetup,
    links: dict[str, KVProducer],
    reader: ProcessPeer,
    counts: dict[str, int],
    page: torch.Tensor,
) -> dict[str, Any]:
    """The seconds of each call at both ends, by link, and the number of wrong pages."""
    sizes = {"gets": setup.gets, "batch": setup.batch, "num_keys": ASKED}
    measured: dict[str, Any] = reader.call("measure", counts=counts, **sizes)
    for seconds in measured["seconds"].values():
        seconds |= {"put": [], "withdraw": [], "stats": []}
    data, order = TensorTransferData(EXTRA, {NAME: page}), list(links)
    for turn in range(setup.gets):
        for side in order if turn % 2 else order[::-1]:
            link, own = links[side], measured["seconds"][side]
            own["put"].append(_timed(partial(link.put, data, readers=None)))
            own["withdraw"].append(_timed(partial(link.withdraw, EXTRA)))
            own["stats"].append(_timed(link.stats))
    for side, link in links.items():
        measured["wrong"] += link.stats()["transfers"]["kept"] != counts[side]
    return measured


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


@contextlib.contextmanager
def _reader() -> Iterator[ProcessPeer]:
    """A reader in a process of its own."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        peer = ProcessPeer(environment, module="kept_reader", concurrent=False)
        with contextlib.closing(peer):
            yield peer
    except (PeerExited, PeerError) as error:
        raise BenchError(f"a reader failed: {error}") from None


def _url(name: str) -> str:
    return f"shm://kept-{name}-{os.getpid()}"


def _machine() -> dict[str, int]:
    """Bytes of the machine: of shared memory, and those in use."""
    with open("/proc/meminfo") as lines:
        values = {name: 1024 * int(rest.split()[0]) for name, _, rest in map(_halves, lines)}
    return {"shmem": values["Shmem"], "used": values["MemTotal"] - values["MemAvailable"]}


def _halves(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _own_memory() -> dict[str, int]:
    gc.collect()
    return memory_of("self")


def _anonymous() -> int:
    """Bytes of this process that are no file's and no shared memory's."""
    with open("/proc/self/status") as lines:
        values = {name: rest for name, _, rest in map(_halves, lines)}
    return 1024 * int(values["RssAnon"].split()[0])


def _less(there: dict[str, int], here: dict[str, int]) -> dict[str, int]:
    return {name: value - here[name] for name, value in there.items()}


def result_of(setup: KeptSetup, shared: Shared | None, kept: Kept | None) -> Result:
    """The figures, tables and bars of what was measured."""
    figures: dict[str, Any] = {"load": list(os.getloadavg())}
    head, tables, lines = list[tuple[str, str]](), list[str](), list[tuple[str, str]]()
    failed = 0
    if shared is not None:
        figures["shared"] = _shared_figures(setup, shared)
        head.append(("payload", f"{setup.shape.text}, kept, read by {setup.readers} processes"))
        tables.append(_shared_table(setup, shared))
        lines.append(("bytes", f"{shared.differing} readers of {setup.readers} saw other bytes"))
        failed += shared.differing
    if kept is not None:
        figures["pages"] = _page_figures(setup, kept)
        head.append(
            (
                "pages",
                f"{setup.pages} of {setup.page_bytes} bytes at one link, {setup.few} at another; "
                f"medians of {setup.rounds} rounds of {setup.gets} calls, {setup.batch} in a batch",
            )
        )
        tables.append(_page_table(kept))
        own = ", ".join(f"{side} {nbytes:.0f}" for side, nbytes in kept.bookkeeping.items())
        lines.append(("memory", f"the producer's own, bytes a page: {own}"))
        lines.append(("bytes", f"{kept.wrong} pages were wrong or missing"))
        failed += kept.wrong
    lines.append(load_line())
    bars = [*_shared_bars(setup, shared), *_page_bars(setup, kept)]
    return Result(figures, head, "\n\n".join(tables), lines, bars, failed=failed)


def _shared_figures(setup: KeptSetup, shared: Shared) -> dict[str, Any]:
    return {
        "payload_bytes": setup.shape.nbytes,
        "readers": setup.readers,
        "differing": shared.differing,
        "machine": shared.machine,
        "producer": shared.producer,
        "by_reader": shared.readers,
        "pss_of_all": shared.pss,
        "last_reader_ms": {name: shared.seconds.milliseconds(name) for name in shared.seconds},
    }


def _shared_table(setup: KeptSetup, shared: Shared) -> str:
    nbytes = setup.shape.nbytes
    private = [reader["private"] for reader in shared.readers]
    rows: list[tuple[str, int, str]] = [
        ("Shmem of the machine", shared.machine["shmem"], "all processes, also of others"),
        ("memory in use", shared.machine["used"], "by MemAvailable, also of others"),
        ("PSS of all processes", shared.pss, "of this benchmark: shared pages count once"),
        ("private, a reader", max(private), "the most that one reader has for itself"),
    ]
    cells = [[name, f"{n / 1e6:.1f}", f"{n / nbytes:.3f}", text] for name, n, text in rows]
    times = shared.seconds.table(
        {
            "first": "the last reader's first get over a new connection, until its views",
            "again": "the same over one that has had the payload",
        },
        ("p50", "min", "max"),
    )
    memory = table(["memory grew by", "MB", "× payload", "what"], cells)
    return f"{memory}\n\n{times}"


def _shared_bars(setup: KeptSetup, shared: Shared | None) -> Bars:
    if shared is None or setup.shape.nbytes < 100 << 20:
        return
    share = shared.pss / setup.shape.nbytes
    yield f"memory of a payload and {setup.readers} readers, × the payload", share, 1.05
    first = shared.seconds.milliseconds("first").p50
    yield f"reader {setup.readers}, get until its views, ms", first, 1.0


def _page_figures(setup: KeptSetup, kept: Kept) -> dict[str, Any]:
    return {
        "pages": setup.pages,
        "few": setup.few,
        "page_bytes": setup.page_bytes,
        "wrong": kept.wrong,
        "bookkeeping_bytes": kept.bookkeeping,
        "milliseconds": {
            side: {name: times.milliseconds(name) for name in _TEXTS}
            for side, times in kept.seconds.items()
        },
        "many_over_few": {name: kept.growth(name) for name in GROWTH},
        "over_copy": {
            name: kept.seconds["many"].ratio_by_round(name, "copy") for name in ("page", "batch")
        },
    }


def _page_table(kept: Kept) -> str:
    sides = ("few", "many")
    rows = [
        row(
            name,
            [
                *(kept.seconds[side].milliseconds(name).p50 for side in sides),
                kept.growth(name).p50,
                kept.seconds["many"].ratio_by_round(name, "copy").p50,
            ],
            text,
        )
        for name, text in _TEXTS.items()
    ]
    return table(["", *(f"{side}, ms" for side in sides), "growth", "× copy", "what"], rows)


def _page_bars(setup: KeptSetup, kept: Kept | None) -> Bars:
    if kept is None or setup.pages < 1000:
        return
    many = kept.seconds["many"]
    yield f"contains of {ASKED} keys, ms", many.milliseconds("contains").p50, 1.0
    if setup.page_bytes >= 1 << 20:
        yield "get and scatter of a page / plain copy", many.ratio_by_round("page", "copy").p50, 1.2
        together = many.ratio_by_round("batch", "copy").p50
        yield f"the same, {setup.batch} pages got together, a page", together, 1.2
    for name in GROWTH:
        yield f"{name} with {setup.pages} kept / with {setup.few}", kept.growth(name).p50, 1.1


def run(argv: Sequence[str]) -> int:
    """Run one command line in this process; return the exit status."""
    parser = Parser(prog="kept.py", description=(__doc__ or "").partition("\n")[0])
    add_options(parser, KeptSetup)
    arguments = parser.parse_args(argv)
    return run_guarded("kept", lambda: run_setup("kept", KeptSetup, measure, arguments))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
