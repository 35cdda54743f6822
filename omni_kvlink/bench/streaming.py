"""What it takes until the reader has copied everything out: as a whole, and layer by layer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from omni_kvlink.bench.pair import Pair, open_pair
from omni_kvlink.bench.payloads import Sample, Shape, Sources, bytes_of, make_sample, torch_dtype
from omni_kvlink.bench.plain import PlainCopy
from omni_kvlink.bench.report import table, wrapped
from omni_kvlink.bench.stats import Summary
from omni_kvlink.link import Allocation
from omni_kvlink.memory.region import Mapping, Region
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.views import dense

KEY = "bench"
WAYS = {
    "plain_copy": "as many bytes, one thread",
    "sequential": "put → get → the reader copied all out, digests checked on the way",
    "streamed": "the same with stream_put, write_layer and stream_get",
    "first_layer": "streamed: stream_put called → the reader copied layer 0 out",
    "at_once": "both copies at the same moment, nothing between them: the floor of any overlap",
    "in_place": "put of memory that allocate gave: digests, header, commit",
    "in_place_bare": "the same without digests",
    "digest": "the digests alone, of as many bytes",
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What to measure, and how."""

    connector: str
    shape: Shape
    url: str = ""
    paged: bool = False
    rounds: int = 20
    warmup: int = 3
    copier: str = "auto"


@dataclasses.dataclass(frozen=True)
class Result:
    """Seconds of every way, round by round."""

    setup: Setup
    seconds: dict[str, list[float]]
    copier: str

    def milliseconds(self, way: str) -> Summary:
        return Summary.of([1e3 * value for value in self.seconds[way]])

    @property
    def ratio(self) -> float:
        """Streamed over sequential, medians of the same rounds."""
        return self.milliseconds("streamed").p50 / self.milliseconds("sequential").p50

    @property
    def floor(self) -> float:
        """What two copies at once take here, over sequential: less is not possible."""
        return self.milliseconds("at_once").p50 / self.milliseconds("sequential").p50

    @property
    def beyond_digest(self) -> float:
        """Milliseconds of an in-place put that are not its digests."""
        return self.milliseconds("in_place").p50 - self.milliseconds("digest").p50

    def bars(self) -> list[dict[str, Any]]:
        """What this setup is held to, where it is one that has a bar."""
        if self.setup.connector != "shm" or self.setup.shape.nbytes < 100 << 20:
            return []
        found = [
            ("streamed / sequential", self.ratio, 0.7),
            ("first layer, ms", self.milliseconds("first_layer").p50, 5.0),
            ("in-place put beyond its digests, ms", self.beyond_digest, 1.0),
        ]
        return [
            {"bar": bar, "got": round(got, 4), "limit": limit, "met": got <= limit}
            for bar, got, limit in found
        ]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        return {
            "payload_bytes": self.setup.shape.nbytes,
            "copier": self.copier,
            "rounds": len(self.seconds["streamed"]),
            "milliseconds": {way: self.milliseconds(way).to_dict() for way in self.seconds},
            "streamed_over_sequential": round(self.ratio, 4),
            "at_once_over_sequential": round(self.floor, 4),
            "in_place_beyond_digest_ms": round(self.beyond_digest, 4),
            "bars": self.bars(),
        }

    def text(self) -> str:
        rows = [self._row(way) for way in self.seconds]
        shape = self.setup.shape
        lines = [
            wrapped(
                "ratio",
                f"streamed = {self.ratio:.2f} × sequential; the two copies at once, as this "
                f"machine's memory lets them, {self.floor:.2f} ×",
            ),
            wrapped("in place", f"{self.beyond_digest:.3f} ms beyond the digests"),
        ]
        for bar in self.bars():
            state = "met" if bar["met"] else "MISSED"
            text = f"{bar['bar']}: {bar['got']:g}, limit {bar['limit']:g}: {state}"
            lines.append(wrapped("bar", text))
        head = [
            wrapped("payload", f"{shape} = {shape.nbytes / 1e6:.3f} MB"),
            wrapped(
                "link",
                f"{self.setup.connector}, copier {self.copier}, both sides "
                f"{'paged: random blocks' if self.setup.paged else 'dense'}",
            ),
        ]
        columns = ["ms", "p50", "min", "max", "what"]
        return "\n\n".join(["\n".join(head), table(columns, rows), "\n".join(lines)])

    def _row(self, way: str) -> list[str]:
        found = self.milliseconds(way)
        values = (found.p50, found.min, found.max)
        return [way.replace("_", " "), *(f"{value:.3f}" for value in values), WAYS[way]]


def measure(setup: Setup, step: Callable[[], None] = lambda: None) -> Result:
    """Run all rounds, the ways in turn; `step` is called after each round."""
    sources: Sources = "paged" if setup.paged else "contiguous"
    sample = make_sample(KEY, setup.shape, np.random.default_rng(0), sources=sources)
    plain = PlainCopy(setup.shape.nbytes)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    quota = 3 * setup.shape.nbytes + (64 << 20)
    own = Mapping.anonymous(sample.cache.plan().nbytes).region
    with open_pair(setup.connector, url=setup.url, copier=setup.copier, quota=quota) as pair:
        for turn in range(setup.warmup + setup.rounds):
            one = {"plain_copy": plain.seconds(), **_whole(pair, sample), **_layers(pair, sample)}
            one.update(**_at_once(pair, sample, own), **_in_place(pair, sample))
            if turn >= setup.warmup:
                for way in WAYS:
                    seconds[way].append(one[way])
            step()
        return Result(setup, seconds, pair.link._copier.name)


def _ask(pair: Pair, sample: Sample, verb: str, **more: Any) -> None:
    """Let the reader wait for the payload, its targets warm, and fall asleep."""
    shape, paged = dataclasses.asdict(sample.shape), bool(sample.cache.block_ids)
    pair.peer.tell(do=verb, key=KEY, timeout=60.0, shape=shape, paged=paged, **more)
    pair.await_reader()


def _whole(pair: Pair, sample: Sample) -> dict[str, float]:
    _ask(pair, sample, "copy_out")
    called = time.monotonic_ns()
    receipt = pair.link.put(sample.cache)
    answer = pair.peer.answer(timeout=60.0)
    receipt.wait(timeout=60.0)
    return {"sequential": 1e-9 * (answer["last"] - called)}


def _layers(pair: Pair, sample: Sample) -> dict[str, float]:
    blank = _blank(sample, KEY)
    layers = list(zip(*sample.cache.layer_blocks.values(), strict=True))
    _ask(pair, sample, "copy_layers_out")
    called = time.monotonic_ns()
    with pair.link.stream_put(blank) as out:
        for index, places in enumerate(layers):
            out.write_layer(index, *(place for place in places if place is not None))
    answer = pair.peer.answer(timeout=60.0)
    assert out.receipt is not None
    out.receipt.wait(timeout=60.0)
    streamed, first = answer["last"] - called, answer["first"] - called
    return {"streamed": 1e-9 * streamed, "first_layer": 1e-9 * first}


def _at_once(pair: Pair, sample: Sample, own: Region) -> dict[str, float]:
    """The reader copies out what it has already, while this side copies into other memory."""
    moment = time.monotonic_ns() + 50_000_000 + 2 * sample.shape.nbytes
    _ask(pair, sample, "copy_out", at=moment)
    receipt = pair.link.put(sample.cache)
    places, plan = sample.cache.tensors(), sample.cache.plan()
    while time.monotonic_ns() < moment:
        pass
    pair.link._copier.gather(places, plan, own)
    ended = time.monotonic_ns()
    answer = pair.peer.answer(timeout=60.0)
    receipt.wait(timeout=60.0)
    return {"at_once": 1e-9 * (max(ended, answer["last"]) - moment)}


def _in_place(pair: Pair, sample: Sample) -> dict[str, float]:
    """With digests, without, and the digests alone; the payload is written, but nobody reads it."""
    found = {}
    for way, digests in (("in_place", True), ("in_place_bare", False)):
        allocation = pair.link.allocate(_blank(sample, "in-place"))
        _fill(allocation, sample)
        start = time.perf_counter()
        receipt = pair.link.put(allocation.data, digests=digests)
        found[way] = time.perf_counter() - start
        if digests:
            found["digest"] = receipt.ledger.seconds["copy"]
        pair.link.abort("in-place")
    return found


def _fill(allocation: Allocation, sample: Sample) -> None:
    for row, place in zip(sample.rows, allocation.data.tensors(), strict=True):
        bytes_of(dense(place))[:] = row.reshape(-1)


def _blank(sample: Sample, key: str) -> KVCacheTransferData:
    return KVCacheTransferData.blank(
        key,
        row=sample.shape.row,
        dtype=torch_dtype(sample.shape.dtype),
        metadata=sample.cache.metadata,
    )
