"""Checks the logs and the directory of a store's campaign for contradictions."""

from __future__ import annotations

import os
import re
from itertools import chain
from typing import TYPE_CHECKING

from omni_kvlink import KVLinkError
from omni_kvlink.kept.payload_directory import PayloadDirectory, file_name
from support.network.store_peers import IDENTITY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from support.network.evidence import Entry, Record
    from support.network.store_campaign import Budgets

BROKEN = ("WRONG", "BROKE", "LEAK", "LATE", "DAMAGED", "MISCOUNTED")
"""A wrong byte, an error that no call may raise, what was not freed, a call that ended late, a file
that is not what was written, and reads that were not counted once."""
READ = ("read", "found")
MOST_NBYTES = 3 * 1_600_000
"""Bytes that a directory has made room for, of payloads that were not written to the end."""
_COUNTED = re.compile(r"(\d+) not written, (\d+) damaged")
_FILE = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors|store\.lock")


def store_contradictions(
    owners: Mapping[str, Sequence[str]],
    records: Sequence[Record],
    budgets: Budgets,
    directory: Path,
) -> Iterator[str]:
    """Yield contradictions to: what a store has taken is read bit-equal, until it is evicted.

    Args:
        owners: The writers of each key.
        records: The logs of all processes.
        budgets: Of the campaign.
        directory: Of the store, which has ended.
    """
    for record in records:
        for entry in record.entries:
            if entry.event in BROKEN:
                yield f"{record.peer}.{record.number}: {entry.key} {entry.event} {entry.number}"
    writers = [record for record in records if record.role == "writer"]
    put = {entry.payload for record in writers for entry in record.entries if entry.event == "keep"}
    for record in records:
        for entry in record.entries:
            if entry.event in READ and entry.payload not in put:
                yield f"{record.peer}.{record.number}: nobody put {entry.payload}, which was read"
    audited = {
        entry.key: entry for r in records if r.role == "auditor" for entry in r.entries
        if entry.event == "found" or entry.event.startswith("gone:")
    }  # fmt: skip
    yield from _lost(owners, writers, audited, budgets, directory)
    yield from _files(audited, directory, budgets.files)


def store_lines(lines: Sequence[str]) -> Iterator[str]:
    """Yield what a store has counted as not written or damaged, of the lines that it printed."""
    for line in lines:
        found = _COUNTED.search(line)
        if found is not None and found.groups() != ("0", "0"):
            yield f"the store says: {line}"


def certain_keys(writers: Sequence[Record]) -> set[str]:
    """What a store has taken for certain: its writer had it in memory until then."""
    certain, withdrawn = set[str](), set[str]()
    for record in writers:
        kept = set[str]()
        for entry in record.entries:
            if entry.event == "kept":
                kept.add(entry.key)
            elif entry.event == "withdraw":
                withdrawn.add(entry.key)
            elif entry.event == "drained" and entry.part == 0:  # none was evicted before
                certain |= kept
    return certain - withdrawn


def withdrawn_keys(writers: Sequence[Record]) -> set[str]:
    """What a store has removed for certain."""
    removed = set[str]()
    for record in writers:
        entries = record.entries
        drained = max((n for n, one in enumerate(entries) if one.event == "drained"), default=0)
        removed |= {one.key for one in entries[:drained] if one.event == "withdrawn"}
    put_again = {
        one.key
        for record in writers
        for number, one in enumerate(record.entries)
        if one.event == "withdraw"
        for later in chain(record.entries[number:], *_later(record, writers))
        if later.event == "keep" and later.key == one.key
    }
    return removed - put_again


def _later(record: Record, writers: Sequence[Record]) -> Iterator[Sequence[Entry]]:
    for other in writers:
        if other.peer == record.peer and other.number > record.number:
            yield other.entries


def _lost(
    owners: Mapping[str, Sequence[str]],
    writers: Sequence[Record],
    audited: Mapping[str, Entry],
    budgets: Budgets,
    directory: Path,
) -> Iterator[str]:
    """Compare what the auditor found with what writers were told."""
    certain, sizes = certain_keys(writers), _sizes(directory)
    for key in owners:
        if key not in audited:
            yield f"{key} was not audited"
    found = {key for key, entry in audited.items() if entry.event == "found"}
    for key in found & withdrawn_keys(writers):
        yield f"{key} was found, and had been withdrawn"
    lost = {key: audited[key].event for key in certain & audited.keys() - found}
    used = sum(sizes.values())
    if lost and used + MOST_NBYTES < budgets.files:
        yield f"lost: {lost}, while there are {used} bytes of {budgets.files} in files"


def _files(audited: Mapping[str, Entry], directory: Path, budget: int) -> Iterator[str]:
    """Compare the files of the directory with what the auditor found, and check each of them."""
    for name in os.listdir(directory):
        if not _FILE.fullmatch(name):
            yield f"left in the directory: {name}"
    sizes = _sizes(directory)
    if sum(sizes.values()) > budget:
        yield f"{sum(sizes.values())} bytes in files, of {budget}"
    keys = {file_name(key): key for key in map(IDENTITY.key, audited)}
    found = {file_name(IDENTITY.key(key)) for key, one in audited.items() if one.event == "found"}
    for name in sizes.keys() - found:
        yield f"{keys.get(name, name)} has a file, and was not found"
    for name in found - sizes.keys():
        yield f"{keys[name]} was found, and has no file"
    yield from _torn([keys[name] for name in sizes.keys() & keys.keys()], directory, budget)


def _torn(keys: Collection[str], directory: Path, budget: int) -> Iterator[str]:
    with PayloadDirectory(directory, budget) as files:
        for key in keys:
            try:
                if files.read(key) is None:
                    yield f"the file of {key} cannot be read: {files.last_error}"
            except KVLinkError as error:  # noqa: PERF203 (it is rare)
                yield f"the file of {key} is torn: {error}"


def _sizes(directory: Path) -> dict[str, int]:
    with os.scandir(directory) as entries:
        return {
            entry.name: entry.stat().st_size
            for entry in entries
            if entry.name.endswith(".safetensors")
        }
