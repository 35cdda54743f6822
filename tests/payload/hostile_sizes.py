"""Hostile headers of sheer size. Run as a program, it measures the memory that each case takes."""

from __future__ import annotations

import gc
import json
import os
import resource
import tracemalloc
from collections.abc import Callable
from typing import Any

import hostile_notes  # noqa: F401 - adds its cases
from headers import ALIGN, branch, dump, entry, names, note, payload, sealed, spans, text
from hostile import CASES, case, inner, raw, tensors

from omni_kvlink.errors import WireError
from omni_kvlink.payload.manifest import MAX_HEADER
from omni_kvlink.payload.manifest import Manifest

MEASURED = 32 << 10
"""A header shorter than this has no room to ask for megabytes."""
ROOM = MAX_HEADER - 2048
EMOJI = "\U0001f600"
"""One of these in a string makes Python keep all of it in four bytes a character."""
WIDE = EMOJI + "a" * (ROOM // 2)


def extra(value: str) -> bytes:
    return inner('"x":1', f'"x":{value}')


def listed(item: Callable[[int], str], width: int) -> str:
    """As many items as a header has room for."""
    return "[" + ",".join(item(n) for n in range(ROOM // width)) + "]"


def escaped(value: str, marks: str) -> bytes:
    """The value in `extra`, with marks written as escapes, out of sight of who counts them."""
    header = text(None, dump(note(branches=[branch(extra={"x": "@"})])))
    for mark in marks:
        value = value.replace(mark, f"\\u{ord(mark):04x}")
    return sealed(header.replace(b'\\"@\\"', value.encode(), 1))


def many(count: int, **fields: Any) -> bytes:
    """`count` tensors without a digest, each as short as can be."""
    entries = {f"t{n}": {**entry(n, n + 1, [1], "U8"), **fields} for n in range(count)}
    return payload(note(0), entries, data=count)


def largest(*, last: str) -> bytes:
    """The longest header that is all right but for its last digest, written in another way."""
    halves = [f"b{n}" for n in range(32)]
    order = [name for half in halves for name in names(half, 64)]
    digests = ["00000000"] * (len(order) - 1) + [last]
    branches = [branch(half, num_layers=64) for half in halves]
    the_note = note(bundle=True, branches=branches, digests=digests)
    return payload(the_note, spans(order), data=ALIGN * (len(order) - 1) + 96)


_MANY = "too much|header length|tensors"
case("70,000 tensors", _MANY, lambda: many(70_000))
case("10,000 tensors", "multiple of 256", lambda: many(10_000))
case("12,000 tensors of null", "lacks|not a kvlink", lambda: _nulls(12_000))
case("4,096 tensors, last digest wrong", "digest is not", lambda: largest(last="0000000g"))
case("empty lists", "too much", lambda: extra(listed(lambda n: "[]", 3)))
case("empty objects", "too much", lambda: extra(listed(lambda n: "{}", 3)))
case("lists in lists", "too much", lambda: extra(listed(lambda n: "[" * 25 + "]" * 25, 51)))
case("lists in lists in a field", "too much", lambda: _field(listed(lambda n: "[[]]", 5)))
case("escaped lists", "too much", lambda: escaped(listed(lambda n: "[]", 18), "[],"))
case("escaped objects", "too much", lambda: escaped(listed(lambda n: "{}", 18), "{},"))
case("short strings", "too much", lambda: extra(listed(lambda n: f'"{n:x}"', 10)))
case("escaped strings", "too much", lambda: escaped(listed(lambda n: f'"{n:x}"', 18), '"'))
case("keys", "too much", lambda: extra("{" + listed(lambda n: f'"{n:x}":0', 12)[1:-1] + "}"))
case("numbers", "too much", lambda: extra(listed(lambda n: "1e5", 4)))
case("numbers in a field", "too much", lambda: _field(listed(lambda n: "1e5", 4)))
case("key 80,000 times", "twice|too much", lambda: extra("{" + '"a":0,' * 80_000 + '"a":0}'))
case("key 20,000 times", "twice", lambda: extra("{" + '"a":0,' * 20_000 + '"a":0}'))
case("request id of 1 MB", "request id", lambda: payload(note(request_id="a" * ROOM)))
case("wide header", "too much", lambda: payload(note(request_id=EMOJI + "a" * ROOM)))
case("wide request id", "request id", lambda: payload(note(request_id=WIDE)))
case("escaped request id", "request id", lambda: inner('"r"', f'"\\ud83d\\ude00{WIDE[1:]}"'))
case("wide dtype", "has dtype", lambda: tensors(dtype=WIDE))
case("wide name", "lacks", lambda: payload(None, {WIDE: {}}))
case("wide producer", "twice", lambda: _wide_producer())
case("wide field", "twice", lambda: raw('"dtype"', f'"x":"{WIDE}","x":1,"dtype"'))
case("digest of 1 MB", "digest is not", lambda: payload(note(digests=["0" * ROOM, "", "", ""])))
case("header of 4 MB", "header length", lambda: sealed(text() + b" " * (4 << 20)))


def _nulls(count: int) -> bytes:
    return payload(note(0), {f"t{n}": {} for n in range(count)}, data=0)


def _field(value: str) -> bytes:
    return raw('"dtype"', f'"x":{value},"dtype"')


def _wide_producer() -> bytes:
    wide = dump(note(producer={"library": WIDE}))
    return payload(wide.replace('"library"', '"host":"","host":"","library"', 1))


def cost(make: Callable[[], bytes]) -> tuple[int, int]:
    """Bytes that refusing a payload takes: as Python counts them, and as the kernel does."""
    data = make()
    return _in_a_child(lambda: _traced(data)), _in_a_child(lambda: _resident(data))


def _traced(data: bytes) -> int:
    tracemalloc.start()
    _refuse(data)
    return tracemalloc.get_traced_memory()[1]


def _resident(data: bytes) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _refuse(data)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def _refuse(data: bytes) -> None:
    try:
        Manifest.decode(data)
    except WireError:
        return
    raise SystemExit("a hostile header was accepted")


def _in_a_child(measure: Callable[[], int]) -> int:
    """A forked child starts its high-water mark at what is resident now."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(measure()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return int(found)


if __name__ == "__main__":
    gc.freeze()
    large = {name: make for name, _, make in CASES if len(make()) > MEASURED}
    print(json.dumps({name: cost(make) for name, make in large.items()}))
