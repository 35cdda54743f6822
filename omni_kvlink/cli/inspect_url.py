"""`kvlink inspect URL`: the payloads that a live producer keeps, as a table or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from omni_kvlink.cli.process import interruptible, show
from omni_kvlink.cli.terminal import folded, table
from omni_kvlink.errors import SchemaError, format_seconds

if TYPE_CHECKING:
    import argparse

    from omni_kvlink.lowlevel import LivePayload, ProducerReport

_HEAD = ("state", "miss", "read", "bytes", "age", "ttl", "path", "key")
_NOTE = """miss: readers that have not come; read: gets that have it; +1: disconnected readers that
may still look at it; ttl: until it expires"""
_STEPS = ((86_400, "d"), (3600, "h"), (60, "min"))


def inspect_url(arguments: argparse.Namespace) -> int:
    """Connect to the producer, ask it, and show the answer."""
    from omni_kvlink import KVLink
    from omni_kvlink.lowlevel import inspect_producer

    if arguments.against is not None:
        raise SchemaError("--against: of a file only, and this is a producer's URL")
    url, timeout = arguments.target, arguments.timeout
    with interruptible(), KVLink.connect(url, timeout=timeout) as consumer:
        report = inspect_producer(consumer, prefix=arguments.prefix, timeout=timeout)
        url = consumer.url
    if arguments.json:
        show(json.dumps({"url": url, **report.to_dict()}, indent=2))
    else:
        show("\n".join(_text(url, report)))
    return 0


def _text(url: str, report: ProducerReport) -> list[str]:
    transfers, memory, payloads = report.transfers, report.memory, report.payloads
    lines = [
        f"{url}: live payloads {transfers['live']:,}, leases {transfers['leased']:,}, "
        f"waiting gets {transfers['waiting']:,}",
        f"memory: {_size(memory['used'])} of {_size(memory['quota'])} used, "
        f"{_size(memory['mapped'])} mapped; waiting puts {memory['waiting']:,}",
        f"since the start: {transfers['released']:,} released, {transfers['expired']:,} expired, "
        f"{transfers['failed']:,} failed, {transfers['redelivered']:,} delivered again",
    ]
    rows = [_row(payload) for payload in payloads]
    tail = [table(_HEAD, rows), folded(_NOTE)] if rows else ["no payload is kept under such a key"]
    return [*map(folded, lines), *tail]


def _row(payload: LivePayload) -> list[str]:
    form = "" if payload.form == "memory" or payload.form in payload.path else payload.form
    ttl = "-" if payload.ttl_ms is None else _seconds(payload.ttl_ms)
    pinned = f"+{payload.pinned}" if payload.pinned else ""
    return [
        payload.state,
        str(payload.missing),
        f"{payload.reading}{pinned}",
        _size(payload.nbytes),
        _seconds(payload.age_ms),
        ttl,
        " ".join(filter(None, (payload.path, form))) or "-",
        ascii(payload.key),  # a key may be a client's: it must not control the terminal
    ]


def _seconds(milliseconds: int) -> str:
    """Return a duration as short as a column is."""
    seconds = milliseconds / 1e3
    for step, unit in _STEPS:
        if seconds >= step:
            return f"{seconds / step:.1f} {unit}"
    return format_seconds(round(seconds))


def _size(nbytes: int) -> str:
    """Return a number of bytes as short as a column is."""
    size, units = float(nbytes), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    for larger in units:
        if size < 999.5:
            break
        size, unit = size / 1e3, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
