"""`Recording`: a directory of payload files, an index of them, and a list of their digests."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from errno import EEXIST
from pathlib import Path
from typing import TYPE_CHECKING

from omni_kvlink.errors import FileError, WireError
from omni_kvlink.inspection.chunk_fault import faults_of
from omni_kvlink.inspection.payload_file import PayloadFile
from omni_kvlink.inspection.record import FILE_NAME, Record, read_index
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

INDEX, DIGESTS = "index.jsonl", "digests.txt"


class Recording:
    """A new recording in a directory, which is made if there is none; thread-safe.

    Each payload is a file of its own, whole or absent. Its line in the index follows it, so that a
    process which is killed leaves a recording of all that came before.

    FileError if the directory has a recording, or cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        self._lock, self._started, self._count = threading.Lock(), time.monotonic(), 0
        with translate_errors(str(directory), "give another directory", FileError):
            self.directory.mkdir(parents=True, exist_ok=True)
            for name in (INDEX, DIGESTS):
                with open(self.directory / name, "ab") as listed:
                    if os.fstat(listed.fileno()).st_size:
                        raise FileExistsError(EEXIST, "there is a recording")

    def add(
        self, save: Callable[[Path], None], call: Literal["get", "put"], started: float
    ) -> Record:
        """Add the payload that `save` writes to a path, and check its digests; blocks for that.

        `started` is when its call began, on the clock of `time.monotonic`. Two calls record side by
        side; the index has them in the order in which their files are complete.
        """
        ended = time.monotonic()
        with self._lock:
            self._count += 1
            path = self.directory / FILE_NAME.format(self._count)
        save(path)
        file = PayloadFile(path)
        record = Record(
            file=path.name,
            key=file.manifest.request_id,
            call=call,
            time=max(0.0, ended - self._started),
            seconds=max(0.0, ended - started),
            nbytes=file.manifest.nbytes,
            sha256=sha256_of(file),
            wrong=sum(1 for spec in file.manifest.tensors for _ in faults_of(file, spec)),
        )
        with self._lock, translate_errors(str(self.directory), "record elsewhere", FileError):
            for name, line in ((INDEX, record.line()), (DIGESTS, _digest_line(record))):
                with open(self.directory / name, "ab", buffering=0) as listed:
                    listed.write(line)
        return record


def sha256_of(file: PayloadFile) -> str:
    """The SHA-256 of a file, as `sha256sum` prints it."""
    return hashlib.sha256(file.region.view()).hexdigest()


def read_recording(directory: str | os.PathLike[str]) -> list[Record]:
    """The records of a recording, in the order of its index.

    FileError if there is none; WireError if the index is not one.
    """
    path = Path(directory) / INDEX
    with translate_errors(str(path), "give the directory of a recording", FileError):
        text = path.read_bytes()
    try:
        return list(read_index(text))
    except (ValueError, RecursionError) as error:
        raise WireError(f"{path} is no index of a recording: {error}") from None


def _digest_line(record: Record) -> bytes:
    return f"{record.digest_line()}\n".encode()
