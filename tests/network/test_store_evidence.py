"""The judge of a store's campaign sees what is lost, stale, torn, left over, or was never put."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from omni_kvlink.kept.payload_directory import PayloadDirectory, file_name
from support.network.evidence import Entry, Record
from support.network.store_campaign import Budgets
from support.network.store_evidence import store_contradictions, store_lines
from support.network.store_peers import IDENTITY, made
from support.payloads.random_caches import written

if TYPE_CHECKING:
    from pathlib import Path

BUDGETS = Budgets(8 << 20, 256 << 20, 64 << 20)
ONE, TWO = "store.0.0", "store.1.1"
OWNERS = {ONE: ["W0"], TWO: ["W0"]}
KEPT = [Entry(key, event, 0) for key in (ONE, TWO) for event in ("keep", "kept")]
DRAINED = Entry("-", "drained", 0, 0)
FOUND = [Entry(ONE, "found", 0), Entry(TWO, "found", 0)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store's, with both payloads."""
    with PayloadDirectory(tmp_path / "kept", BUDGETS.files) as files:
        for key in (ONE, TWO):
            manifest, mapping = written(made(key, 0), digests=True)
            assert files.write(manifest, mapping.region.view())
    return tmp_path / "kept"


def judged(directory: Path, writer: list[Entry], auditor: list[Entry]) -> list[str]:
    records = [
        Record("writer", "W0", 0, False, writer),
        Record("auditor", "Z", 0, False, auditor),
    ]
    return list(store_contradictions(OWNERS, records, BUDGETS, directory))


def test_all_is_well(directory: Path) -> None:
    assert judged(directory, [*KEPT, DRAINED], FOUND) == []


@pytest.mark.parametrize("event", ["WRONG", "BROKE", "LEAK", "LATE", "DAMAGED", "MISCOUNTED"])
def test_what_no_process_may_write(directory: Path, event: str) -> None:
    assert judged(directory, [*KEPT, DRAINED, Entry(ONE, event)], FOUND) != []


def test_a_payload_that_was_taken_is_lost(directory: Path) -> None:
    (directory / file_name(IDENTITY.key(TWO))).unlink()
    gone = [FOUND[0], Entry(TWO, "gone:absent")]
    [problem] = judged(directory, [*KEPT, DRAINED], gone)
    assert problem.startswith("lost: ")
    # Its writer may have been killed before the store had it, or its memory was wanted before.
    assert judged(directory, KEPT, gone) == []
    assert judged(directory, [*KEPT, Entry("-", "drained", 0, 1)], gone) == []


def test_a_payload_that_was_withdrawn_is_found(directory: Path) -> None:
    ends = [Entry(TWO, "withdraw", 0), Entry(TWO, "withdrawn", 0)]
    [problem] = judged(directory, [*KEPT, *ends, DRAINED], FOUND)
    assert "had been withdrawn" in problem
    assert judged(directory, [*KEPT, DRAINED, *ends], FOUND) == []  # the store did not hear of it


def test_a_payload_that_nobody_put(directory: Path) -> None:
    [problem] = judged(directory, [*KEPT, DRAINED], [FOUND[0], Entry(TWO, "found", 7)])
    assert "nobody put" in problem


def test_a_key_that_was_not_audited(directory: Path) -> None:
    assert f"{TWO} was not audited" in judged(directory, [*KEPT, DRAINED], FOUND[:1])


def test_files_that_are_torn_or_left(directory: Path) -> None:
    (directory / "draft.part").write_bytes(b"")
    path = directory / file_name(IDENTITY.key(TWO))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    left, torn = judged(directory, [*KEPT, DRAINED], FOUND)
    assert left == "left in the directory: draft.part"
    assert "is torn" in torn


def test_lines_of_a_store() -> None:
    good = "1 loaded, 0 not written, 0 damaged"
    assert list(store_lines([good])) == []
    assert len(list(store_lines([good, "1 loaded, 2 not written, 0 damaged"]))) == 1
