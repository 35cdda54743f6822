"""Pages of a producer's payloads, from its table; and the questions of a connection."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.connectors.protocol.chunk_window import ChunkWindow
from omni_kvlink.connectors.protocol.inspection import MAX_CHUNKS, Inspections, inspected_page
from omni_kvlink.connectors.protocol.messages import (
    MAX_MESSAGE,
    MAX_ROWS,
    Get,
    Inspect,
    Inspected,
    Location,
    Release,
    decode,
    encode,
)
from omni_kvlink.connectors.protocol.transfer import Transfer
from omni_kvlink.connectors.protocol.transfer_table import TransferTable
from omni_kvlink.errors import PeerLostError
from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Iterable

# Reaches into _pending: the number of questions without an answer, for which no event is.

POOL = dict.fromkeys(("quota", "mapped", "used", "arenas", "blocks", "waiting", "prefault"), 7)
AT = Location(0, 0, 1000)


def table_of(keys: Iterable[str]) -> TransferTable:
    table = TransferTable(lambda peer, message: None, lambda transfer: None)
    table.commit([(Transfer(key), AT) for key in keys], 1, math.inf)
    return table


def page(table: TransferTable, *fields: Any, **named: Any) -> Inspected:
    """A page as it arrives at the consumer."""
    data = encode(inspected_page(Inspect(1, *fields, **named), table, lambda: POOL, 10.0))
    assert len(data) <= MAX_MESSAGE
    answer = decode(data)
    assert isinstance(answer, Inspected)
    return answer


def pages(table: TransferTable, prefix: str = "") -> list[Inspected]:
    found = [page(table, prefix=prefix)]
    while found[-1].resume:
        found.append(page(table, found[-1].resume, prefix=prefix))
    return found


def keys_of(found: list[Inspected]) -> list[str]:
    return [payload.key for each in found for payload in each.payloads]


@pytest.mark.parametrize("count", [0, 1, MAX_ROWS, MAX_ROWS + 1, 3 * MAX_ROWS])
def test_every_payload_comes_once_and_in_order(count: int) -> None:
    keys = [f"k{number}" for number in range(count)]
    found = pages(table_of(keys))
    assert keys_of(found) == keys
    assert len(found) == max(1, -(-count // MAX_ROWS))
    assert [bool(each.transfers and each.memory) for each in found] == [True] + [False] * (
        len(found) - 1
    )
    assert found[0].transfers["live"] == count
    assert found[0].memory == {name: 7 for name in POOL if name != "prefault"}


def test_a_page_looks_at_so_many_whatever_the_prefix() -> None:
    """Of a prefix that few keys have, pages are empty: none takes longer than the others."""
    table = table_of(f"k{number}" for number in range(1000))
    found = pages(table, "k99")
    assert keys_of(found) == ["k99", *(f"k99{digit}" for digit in range(10))]
    assert len(found) == 4
    assert [len(each.payloads) for each in found] == [1, 0, 0, 10]


def test_a_page_goes_on_among_payloads_that_come_and_go() -> None:
    table = table_of(f"k{number}" for number in range(600))
    first = page(table)
    for key in ("k0", "k255", "k256", "k599"):
        table.fail(key, "why", "failed", 10.0)
    table.commit([(Transfer("k0"), AT)], 1, math.inf)  # put again: it has a new epoch
    rest = page(table, first.resume)
    rest = Inspected(1, rest.payloads + page(table, rest.resume).payloads)
    assert keys_of([first]) == [f"k{number}" for number in range(256)]
    assert keys_of([rest]) == [*(f"k{number}" for number in range(257, 599)), "k0"]


@pytest.mark.parametrize("key", ["k" * 1000, "\N{GRINNING FACE}" * 1000])
def test_long_keys_fit_in_a_message(key: str) -> None:
    keys = [f"{number:04}{key}" for number in range(300)]
    found = pages(table_of(keys))
    assert keys_of(found) == keys
    assert len(found) > 2


def test_forms_sizes_and_times() -> None:
    table = table_of([])
    reserved, streaming, grow = Transfer("r", block=(0, 0, 4096)), Transfer("s"), Transfer("g")
    table.reserve([reserved, streaming, grow])
    table.layers.begin(streaming, AT, 100, 2)
    table.layers.begin(grow, AT, 100, 1, window=ChunkWindow(1, 9))
    chunks = [Transfer("g", stream=grow) for _ in range(3)]
    table.reserve(chunks)
    table.commit([(chunk, AT) for chunk in chunks], 1, math.inf)
    table.commit([(Transfer("i", inline=b"bytes"), Location(0, 0, 5))], 3, 12.5)
    for transfer in (reserved, streaming, grow):
        transfer.begun = 4.0
    found = {each.key: each for each in page(table).payloads}
    shown = {key: (p.state, p.form, p.nbytes, p.missing, p.chunks) for key, p in found.items()}
    assert shown == {
        "r": ("reserved", "memory", 4096, 0, 0),
        "s": ("streaming", "stream", 1000, 2, 0),
        "g": ("streaming", "append", 4000, 1, 3),
        "i": ("committed", "inline", 5, 3, 0),
    }
    assert [(p.age_ms, p.ttl_ms) for p in found.values()][:3] == [(6000, None)] * 3
    assert found["i"].ttl_ms == 2500


def test_what_a_disconnected_reader_may_look_at() -> None:
    """Also when it has ended, and a chunk; until it is released."""
    table = table_of(["k", "k2"])
    for number, key in enumerate(("k", "k2"), 1):
        table.on_get("peer", Get(number, key), 0.0)
    assert [(p.state, p.reading) for p in page(table).payloads] == [("leased", 1)] * 2
    assert table.on_disconnect("peer")
    assert [(p.state, p.pinned) for p in page(table).payloads] == [("committed", 1)] * 2
    table.fail("k", "why", "failed", 0.0)
    assert [(p.key, p.state, p.pinned) for p in page(table).payloads] == [
        ("k", "failed", 1),
        ("k2", "committed", 1),
    ]
    assert keys_of([page(table, 1)]) == ["k2"]
    assert keys_of([page(table, limit=1)]) == ["k"]
    release = Release(1, 1, "read")
    table.on_release("peer", release.get_id, release.epoch, release.outcome, "", 0.0)
    assert keys_of(pages(table)) == ["k2"]


def test_chunks_count_as_work() -> None:
    """A page ends behind streams with many chunks, and of one it adds up so many at most."""
    table = table_of([])
    streams = [Transfer(f"g{number}") for number in range(3)]
    table.reserve(streams)
    for stream in streams:
        stream.window = ChunkWindow(1, 10_000)
        stream.window.chunks.extend([Transfer("", inline=b"x")] * (MAX_CHUNKS + 1))
    first = page(table)
    assert [(p.key, p.nbytes, p.chunks) for p in first.payloads] == [
        ("g0", MAX_CHUNKS, MAX_CHUNKS + 1)
    ]
    assert keys_of(pages(table)) == ["g0", "g1", "g2"]


def test_the_end_of_a_connection_ends_its_questions() -> None:
    sent = list[Any]()
    inspections, errors = Inspections(sent.append), list[BaseException]()

    def send_question() -> None:
        try:
            inspections.request(0, "", 60.0)
        except PeerLostError as error:
            errors.append(error.with_traceback(None))

    thread = threading.Thread(target=send_question)
    thread.start()
    until(lambda: len(inspections._pending) == 1, "it waits")
    inspections.on_answer(Inspected(99))  # late or unasked: nobody waits for it
    inspections.close(PeerLostError("gone"))
    thread.join()
    assert [str(error) for error in errors] == ["gone"]
    send_question()
    assert len(errors) == 2
    assert len(sent) == 1


def test_a_question_without_an_answer() -> None:
    inspections = Inspections(lambda message: None)
    assert inspections.request(0, "", 0.0) is None
    assert not inspections._pending
