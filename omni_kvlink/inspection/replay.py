"""`Replay`: puts the payloads of a recording again, byte for byte, at their times."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from omni_kvlink.errors import IntegrityError, TransferFailed
from omni_kvlink.inspection.payload_file import PayloadFile
from omni_kvlink.inspection.recording import sha256_of
from omni_kvlink.link import put_encoded

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.inspection.record import Record
    from omni_kvlink.link import KVProducer


class Replay:
    """Puts each payload of a recording under its key.

    Args:
        directory: of the recording.
        records: what `read_recording` found there, or some of it.
        producer: the link's end that puts them.
        speed: of the recording's time; 2.0 is twice as fast, infinity waits for nothing.
        readers, ttl: of each payload, as for `put`; there is memory for it within `ttl` seconds.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        records: Sequence[Record],
        producer: KVProducer,
        *,
        speed: float = 1.0,
        readers: int = 1,
        ttl: float = 60.0,
    ):
        self.records, self._directory, self._producer = records, Path(directory), producer
        self._speed, self._readers, self._ttl = speed, readers, ttl
        self._receipts: dict[str, Receipt] = {}
        self.lost: dict[str, str] = {}
        """Reasons of the payloads that not every reader received, by key."""

    def put_all(self) -> Iterator[Record]:
        """Put the payloads, and yield the record of each once it is committed.

        A key that comes again waits until its payload before was received. IntegrityError if a file
        is not the one that was recorded.
        """
        started = time.monotonic()
        for record, delay in zip(self.records, delays(self.records, self._speed), strict=True):
            threading.Event().wait(max(0.0, started + delay - time.monotonic()))
            self._await(record.key)
            self._receipts[record.key] = self._put(record)
            yield record

    def await_readers(self) -> None:
        """Wait until each payload was received, or will not be: then `lost` has it."""
        for key in list(self._receipts):
            self._await(key)

    def _put(self, record: Record) -> Receipt:
        file = PayloadFile(self._directory / record.file)
        if sha256_of(file) != record.sha256 or file.manifest.request_id != record.key:
            raise IntegrityError(f"{file.path} is not the file that was recorded")
        manifest, payload = file.manifest, file.region.view()
        options = {"ttl": self._ttl, "timeout": self._ttl}
        return put_encoded(self._producer, manifest, payload, readers=self._readers, **options)

    def _await(self, key: str) -> None:
        receipt = self._receipts.pop(key, None)
        if receipt is None:
            return
        try:
            receipt.wait(timeout=math.inf)  # it expires, unless it is being read
        except TransferFailed as error:
            self.lost[key] = error.reason


def delays(records: Sequence[Record], speed: float) -> list[float]:
    """Return the seconds from the first payload to each, at this speed."""
    return [(record.time - records[0].time) / speed for record in records]
