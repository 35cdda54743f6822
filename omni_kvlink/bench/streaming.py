"""The latency until the reader has copied all out: as a whole, and layer by layer."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_kvlink.bench.membench import PlainCopy
from omni_kvlink.bench.pair import TIMEOUT, Pair, open_setup
from omni_kvlink.bench.payloads import Sample, bytes_of, make_sample, torch_dtype
from omni_kvlink.bench.result import Result
from omni_kvlink.bench.stats import Timings
from omni_kvlink.cli.terminal import Progress, progress
from omni_kvlink.copier import Copier, named_copier
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.views import dense

if TYPE_CHECKING:
    from concurrent.futures import Future

    from omni_kvlink.bench.setups import StreamSetup
    from omni_kvlink.memory.region import Region

KEY = "bench"
MEASUREMENTS = {
    "plain_copy": "as many bytes, one thread",
    "sequential": "put → get → the reader copied all out, digests checked on the way",
    "into": "put → get(into=) of a reader that waited: it copies while put does",
    "streamed": "the same with stream_put, write_layer and stream_get",
    "first_layer": "streamed: stream_put called → the reader copied layer 0 out",
    "at_once": "both copies at the same moment, nothing between them: the floor of any overlap",
    "in_place": "put of memory that allocate gave: digests, header, commit",
    "in_place_bare": "the same without digests",
    "digest": "the digests alone, of as many bytes",
}


def measure(setup: StreamSetup, progress: Progress = progress) -> Result:
    """Run every measurement once a round."""
    sample = make_sample(
        KEY, setup.shape, np.random.default_rng(0), sources="paged" if setup.paged else "contiguous"
    )
    plain, copier = PlainCopy(setup.shape.nbytes), named_copier(setup.copier)
    quota = 3 * setup.shape.nbytes + (64 << 20)
    target = Mapping.anonymous(sample.cache.plan().nbytes).region
    count, rounds = setup.warmup + setup.rounds, list[dict[str, float]]()
    with (
        open_setup(setup, copier=copier, quota=quota) as pair,
        progress("rounds", count) as step,
    ):
        for _ in range(count):
            timings = {"plain_copy": plain.seconds()}
            timings |= {row: _whole(pair, sample, call) for row, call in _WHOLE.items()}
            timings |= _layers(pair, sample)
            timings |= _at_once(pair, sample, copier, target) | _in_place(pair, sample)
            rounds.append(timings)
            step()
        return _result(setup, Timings.of_rounds(rounds[setup.warmup :]), copier.name)


def _result(setup: StreamSetup, times: Timings, copier: str) -> Result:
    ratio, at_once = (times.ratio_of(name, "sequential") for name in ("streamed", "at_once"))
    into, sequential = (times.ratio_of(name, "plain_copy") for name in ("into", "sequential"))
    beyond_digest = times.milliseconds("in_place").p50 - times.milliseconds("digest").p50
    sides = "paged: random blocks" if setup.paged else "dense"
    ratio_text = (
        f"streamed = {ratio:.2f} × sequential; the two copies at once, as this machine's memory "
        f"lets them, {at_once:.2f} ×; get(into=) = {into:.2f} × a plain copy, get and scatter "
        f"{sequential:.2f} ×"
    )
    has_bars = setup.connector == "shm" and setup.shape.nbytes >= 100 << 20
    bars = [
        ("streamed / sequential", ratio, 0.7),
        ("get(into=) / plain copy", into, 1.35),
        ("first layer, ms", times.milliseconds("first_layer").p50, 5.0),
        ("in-place put beyond its digests, ms", beyond_digest, 1.0),
    ]
    return Result(
        figures={
            "payload_bytes": setup.shape.nbytes,
            "copier": copier,
            "rounds": setup.rounds,
            "milliseconds": {name: times.milliseconds(name) for name in MEASUREMENTS},
            "streamed_over_sequential": round(ratio, 4),
            "at_once_over_sequential": round(at_once, 4),
            "into_over_plain_copy": round(into, 4),
            "in_place_beyond_digest_ms": round(beyond_digest, 4),
        },
        head=[
            ("payload", setup.shape.text),
            ("link", f"{setup.connector}, copier {copier}, both sides {sides}"),
        ],
        tables=times.table(MEASUREMENTS, ("p50", "min", "max")),
        lines=[("ratio", ratio_text), ("in place", f"{beyond_digest:.3f} ms beyond the digests")],
        bars=bars if has_bars else (),
    )


def _start_reader(pair: Pair, sample: Sample, command: str, **options: Any) -> Future[Any]:
    """Let the reader make its targets, request the payload, and fall asleep."""
    shape, paged = dataclasses.asdict(sample.shape), bool(sample.cache.block_ids)
    return pair.begin(command, key=KEY, shape=shape, paged=paged, **options)


_WHOLE = {"sequential": "copy_out", "into": "copy_into"}
"""The rows whose payload is put as a whole, and the reader's command."""


def _whole(pair: Pair, sample: Sample, command: str) -> float:
    reading = _start_reader(pair, sample, command)
    called = time.monotonic_ns()
    receipt = pair.link.put(sample.cache)
    last: int = reading.result(TIMEOUT)
    receipt.wait(timeout=TIMEOUT)
    return 1e-9 * (last - called)


def _layers(pair: Pair, sample: Sample) -> dict[str, float]:
    blank = _blank(sample, KEY)
    layers = list(zip(*sample.cache.layer_blocks.values(), strict=True))
    reading = _start_reader(pair, sample, "copy_layers_out")
    called = time.monotonic_ns()
    with pair.link.stream_put(blank) as out:
        for index, parts in enumerate(layers):
            out.write_layer(index, *(part for part in parts if part is not None))
    moments = reading.result(TIMEOUT)
    assert out.receipt is not None
    out.receipt.wait(timeout=TIMEOUT)
    streamed, first = moments["last"] - called, moments["first"] - called
    return {"streamed": 1e-9 * streamed, "first_layer": 1e-9 * first}


def _at_once(pair: Pair, sample: Sample, copier: Copier, target: Region) -> dict[str, float]:
    """The reader copies out a payload that it has, while this process copies into other memory."""
    moment = time.monotonic_ns() + 50_000_000 + 2 * sample.shape.nbytes
    reading = _start_reader(pair, sample, "copy_out", moment=moment)
    receipt = pair.link.put(sample.cache)
    sources, plan = sample.cache.tensors(), sample.cache.plan()
    while time.monotonic_ns() < moment:
        pass
    copier.gather(sources, plan, target)
    ended = time.monotonic_ns()
    last = reading.result(TIMEOUT)
    receipt.wait(timeout=TIMEOUT)
    return {"at_once": 1e-9 * (max(ended, last) - moment)}


def _in_place(pair: Pair, sample: Sample) -> dict[str, float]:
    """An in-place put with digests, without, and the digests alone; no reader gets the payload."""
    seconds = {}
    for name, digests in (("in_place", True), ("in_place_bare", False)):
        allocation = pair.link.allocate(_blank(sample, "in-place"))
        for raw, target in zip(sample.rows, allocation.data.tensors(), strict=True):
            bytes_of(dense(target))[:] = raw.reshape(-1)
        start = time.perf_counter()
        receipt = pair.link.put(allocation.data, digests=digests)
        seconds[name] = time.perf_counter() - start
        if digests:
            seconds["digest"] = receipt.ledger.seconds["copy"]
        pair.link.abort("in-place")
    return seconds


def _blank(sample: Sample, key: str) -> KVCacheTransferData:
    shape, metadata = sample.shape, sample.cache.metadata
    dtype = torch_dtype(shape.dtype)
    return KVCacheTransferData.blank(key, row=shape.row, dtype=dtype, metadata=metadata)
