"""`PayloadDirectory`: payloads as files of one directory, within a budget; for one process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from omni_kvlink.connectors.runtime.user_files import LockFile, check_private
from omni_kvlink.errors import (
    BusyError,
    CapacityError,
    ConnectorError,
    FileError,
    IntegrityError,
    MissingFileError,
    WireError,
    without_frames,
)
from omni_kvlink.payload.digests import verify
from omni_kvlink.payload.safetensors_file import check_padding, open_file, write_kept
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

_LOCK = "store"
"""The lock of a directory is `store.lock` in it."""
_OTHER = "give another --directory"
_FILE = re.compile(r"([0-9a-f]{32})-[0-9a-f]{32}\.safetensors\Z")
_DRAFT = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors\.\d+-\d+\.part\Z")
_COUNTERS = (
    "written",
    "write_failed",
    "too_large",
    "loaded",
    "damaged",
    "unreadable",
    "evicted",
    "withdrawn",
)


def file_name(key: str) -> str:
    """The name of the file of a key: hashes of its name, without identity, and of all of it."""
    name = key.rpartition("@")[0] or key
    return f"{_digest(name)}-{_digest(key)}.safetensors"


class PayloadDirectory:
    """Payloads by key, each a .safetensors file of its own, whole or absent; thread-safe.

    The directory is this user's alone, and one process at a time uses it. What is in it is found
    by the names and sizes of its files: no file is read before it is asked for. A file is checked
    in full by each `read`. Of more than `budget` bytes, the least recently used files are removed.

    Nothing that a disk does is raised after the start: `stats` counts it, and `last_error` is the
    text of the last one.

    Raises:
        BusyError: another store uses the directory.
        ConnectorError: it cannot be made, belongs to another user, or others may write to it.
        FileError: it cannot be read, or no file can be made in it.
    """

    def __init__(self, path: str | os.PathLike[str], budget: int):
        self.path, self.budget, self.last_error = os.fspath(path), budget, ""
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = (
            OrderedDict()
        )  # of files, the least recently used first
        self._names: Counter[str] = Counter()
        self._writing: dict[str, bool] = {}  # whether the file is wanted when it is written
        self._used = 0
        self._counters = dict.fromkeys(_COUNTERS, 0)
        check_private(self.path, other=_OTHER)
        try:
            self._owner = LockFile(os.path.join(self.path, _LOCK), _OTHER)
        except BusyError:
            raise BusyError(f"{self.path}: another store uses this directory: {_OTHER}") from None
        except ConnectorError as error:
            raise FileError(str(error)) from None
        try:
            with translate_errors(self.path, _OTHER, FileError):
                self._index()
        except BaseException:
            self._owner.close()
            raise

    def __contains__(self, key: str) -> bool:
        """Whether there is a file of this key; takes no lock, and reads none."""
        return file_name(key) in self._sizes

    def has_other_identity(self, key: str) -> bool:
        """Whether there is a file of the key's name under another identity; takes no lock."""
        name = file_name(key)
        return self._names.get(name[:32], 0) > (name in self._sizes)

    def write(self, manifest: Manifest, payload: memoryview) -> bool:
        """Write a payload's file; whether there is one now. Blocks for the disk.

        A payload without digests is refused: what was damaged could not be told.
        """
        name, nbytes = file_name(manifest.request_id), manifest.nbytes
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
                return True
            if name in self._writing:  # by another thread
                return False
            if nbytes > self.budget or not manifest.is_covered:
                self._counters["too_large" if nbytes > self.budget else "write_failed"] += 1
                return False
            self._evict_for(nbytes)
            self._writing[name] = True
            self._used += nbytes
        is_written = False
        try:
            write_kept(self._path_of(name), manifest, payload)
            is_written = True
        except FileError as error:
            self.last_error = str(error)
        finally:
            is_kept = self._end_write(name, nbytes, is_written=is_written)
        return is_kept

    def read(self, key: str) -> tuple[Manifest, Region] | None:
        """The payload of a key, in memory of its own, every byte checked; None if there is none.

        Blocks for the disk. WireError if its file was damaged, cut, or of another key: it is
        removed.
        """
        name = file_name(key)
        with self._lock:
            if name not in self._sizes:
                return None
            self._sizes.move_to_end(name)
        path = self._path_of(name)
        try:
            files = _checked(path, key)
        except MissingFileError as error:
            self._count_miss(name, "unreadable", error, is_lost=True)
        except WireError as error:
            self._count_miss(name, "damaged", error, is_lost=True)
            raise without_frames(error) from None
        except (FileError, CapacityError) as error:
            self._count_miss(name, "unreadable", error)
        else:
            with contextlib.suppress(OSError):  # it may be read-only by now
                os.utime(path)  # the order of use outlives this process
            with self._lock:
                self._counters["loaded"] += 1
            return files
        return None

    def remove(self, key: str) -> bool:
        """Remove the file of a key, also one that is being written; whether there was one."""
        name = file_name(key)
        with self._lock:
            if name in self._writing:
                self._writing[name] = False
                return True
            if name not in self._sizes:
                return False
            self._forget(name)
            self._counters["withdrawn"] += 1
        return True

    def stats(self) -> dict[str, int]:
        """Files, bytes and budget now; counters since the start."""
        with self._lock:
            now = {"files": len(self._sizes), "nbytes": self._used, "budget": self.budget}
            return {**now, **self._counters}

    def close(self) -> None:
        """Let another process use the directory; the files stay. A second call does nothing."""
        self._owner.close()

    def __enter__(self) -> PayloadDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PayloadDirectory {self.path!r}: {len(self._sizes)} files>"

    def _index(self) -> None:
        """Find the files, in the order of their last use; remove drafts of a killed process."""
        found: list[tuple[int, str, int]] = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _DRAFT.match(entry.name):
                    os.unlink(entry.path)
                elif _FILE.match(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
        for _, name, nbytes in sorted(found):
            self._remember(name, nbytes)
            self._used += nbytes
        self._evict_for(0)

    def _end_write(self, name: str, nbytes: int, *, is_written: bool) -> bool:
        """Count a file that was written, or not; whether it is there and wanted."""
        with self._lock:
            is_wanted = self._writing.pop(name)
            if is_written and is_wanted:
                self._remember(name, nbytes)
                self._counters["written"] += 1
                return True
            self._used -= nbytes
            self._counters["withdrawn" if is_written else "write_failed"] += 1
            if is_written:
                self._unlink(name)
        return False

    def _count_miss(
        self, name: str, counter: str, error: Exception, *, is_lost: bool = False
    ) -> None:
        with self._lock:
            self._counters[counter] += 1
            self.last_error = str(error)
            if is_lost and name in self._sizes:
                self._forget(name)

    def _path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    # The methods below are called with the lock held, but for `_index`.

    def _remember(self, name: str, nbytes: int) -> None:
        self._sizes[name] = nbytes
        self._names[name[:32]] += 1

    def _forget(self, name: str) -> None:
        """Remove a file; with the lock held, so that no new file of the name is removed."""
        self._unlink(name)
        self._used -= self._sizes.pop(name)
        self._names[name[:32]] -= 1
        if not self._names[name[:32]]:
            del self._names[name[:32]]

    def _evict_for(self, nbytes: int) -> None:
        """Remove the least recently used files until `nbytes` more fit."""
        while self._sizes and self._used + nbytes > self.budget:
            self._forget(next(iter(self._sizes)))
            self._counters["evicted"] += 1

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):  # it is gone, or the disk is read-only by now
            os.unlink(self._path_of(name))


def _checked(path: str, key: str) -> tuple[Manifest, Region]:
    """Read a file into memory; WireError unless it is, bit for bit, the one written for the key."""
    try:
        manifest, region = open_file(path, map_it=False)
        if manifest.request_id != key:
            raise IntegrityError(f"it holds {manifest.request_id!r}, not {key!r}")
        if not manifest.is_covered:
            raise IntegrityError("it has no digests")
        verify(manifest, region)
        check_padding(manifest, region)
    except WireError as error:
        raise type(error)(f"{path}: {error}") from None
    return manifest, region


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
