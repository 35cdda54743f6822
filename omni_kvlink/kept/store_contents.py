"""`StoreContents`: the payloads of a store, in the memory of its link and in files."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import (
    CapacityError,
    DuplicateKeyError,
    KVLinkError,
    TransferTimeout,
    WireError,
)
from omni_kvlink.kept.kept_receipts import KeptReceipts
from omni_kvlink.link import put_encoded

if TYPE_CHECKING:
    from omni_kvlink.kept.payload_directory import PayloadDirectory
    from omni_kvlink.link import KVConsumer, KVProducer
    from omni_kvlink.payload.manifest import Manifest

DAMAGED = "its file was damaged, and is removed"
"""Why a payload is missing whose file is not, bit for bit, what was written."""
_MEMORY_SECONDS = 5.0
"""In which readers may release memory for a payload that finds none."""


class StoreContents:
    """Payloads by key: kept in memory, and, with a directory, written to a file as they come.

    So what memory evicts lies in a file already, and no payload waits for a disk in memory that is
    full. Thread-safe; `in` takes no lock.
    """

    link: KVProducer
    """The link of the store, set when it is open."""

    def __init__(self, directory: PayloadDirectory | None):
        self.directory = directory
        self._receipts, self._counting = KeptReceipts(), threading.Lock()
        self._counters = dict.fromkeys(("added", "no_memory", "lost_at_end"), 0)

    def __contains__(self, key: str) -> bool:
        return key in self._receipts or self.is_filed(key)

    def is_filed(self, key: str) -> bool:
        """Whether there is a file of this key."""
        return self.directory is not None and key in self.directory

    def add(self, manifest: Manifest, payload: memoryview) -> bool:
        """Keep a payload whose bytes were checked; whether it is in memory or in a file now.

        Blocks for the disk, and for memory that readers hold.
        """
        is_kept = self._keep(manifest, payload)
        is_filed = self.directory is not None and self.directory.write(manifest, payload)
        self._count("added" if is_kept or is_filed else "no_memory")
        return is_kept or is_filed

    def load(self, key: str) -> str:
        """Read a payload's file into memory, every byte checked; "", or why it is not there."""
        if key in self._receipts:  # it was loaded, and its readers have it, since it was requested
            return ""
        try:
            found = None if self.directory is None else self.directory.read(key)
        except WireError:
            return DAMAGED
        if found is None:
            return "it was kept, and its file is gone"
        manifest, region = found
        if self._keep(manifest, region.view()):
            return ""
        self._count("no_memory")
        return "it is kept in a file, and there is no memory to load it"

    def remove(self, key: str) -> bool:
        """Withdraw a payload from memory, and remove its file; whether there was one."""
        was_filed = self.directory is not None and self.directory.remove(key)
        self._receipts.discard(key)
        return self.link.withdraw(key) or was_filed

    def write_rest(self, reader: KVConsumer) -> None:
        """Write what lies in memory alone: what a full disk refused before. `reader` reads it."""
        if self.directory is None:
            return
        for key in self._receipts.live():
            if key in self.directory:
                continue
            is_filed = False
            try:
                received = reader.get(key, timeout=_MEMORY_SECONDS, wait=False)
                is_filed = self.directory.write(received.manifest, received.encoded())
                received.release()
            except KVLinkError:
                pass  # it was evicted meanwhile, or there is no memory to read it
            if not is_filed:
                self._count("lost_at_end")

    def stats(self) -> dict[str, Any]:
        """Counters, and what the directory says."""
        with self._counting:
            counted: dict[str, Any] = {**self._counters}
        files = None if self.directory is None else self.directory.stats()
        return {**counted, "directory": files}

    def _keep(self, manifest: Manifest, payload: memoryview) -> bool:
        try:
            receipt = put_encoded(
                self.link, manifest, payload, readers=None, timeout=_MEMORY_SECONDS
            )
        except DuplicateKeyError:
            return True
        except (CapacityError, TransferTimeout):
            return False
        self._receipts.add(receipt)
        return True

    def _count(self, name: str) -> None:
        with self._counting:
            self._counters[name] += 1
