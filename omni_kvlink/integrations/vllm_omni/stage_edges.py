"""Stage edges: the link that a key belongs to, and how its URL is announced and found."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.errors import (
    BusyError,
    SchemaError,
    TransferTimeout,
    UnavailableError,
    format_seconds,
)
from omni_kvlink.lowlevel import (
    LockFile,
    WakeupFifo,
    check_private,
    default_directory,
    wait_readable,
    wake,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from omni_kvlink.integrations.vllm_omni.settings import OmniSettings

REPLICA = ".replica"
"""The text between an edge's name and the number of a further replica."""

_open: weakref.WeakSet[Announcement] = weakref.WeakSet()


class StageEdge(NamedTuple):
    """One link between two stages; each replica of the sending one serves a link of its own."""

    from_stage: str
    to_stage: str
    channel: str  # "kv0", "kv1" … for the KV caches of the sender's ranks, "data" for all else
    replica: int = 0  # of the sending stage

    @classmethod
    def of(cls, from_stage: str, to_stage: str, key: str) -> StageEdge:
        """The edge of a key; vLLM-Omni's manager defines the key's form."""
        if key.startswith(f"omni_{from_stage}_to_{to_stage}_kv_cache_"):
            return cls(from_stage, to_stage, "kv0")
        # With tensor parallelism: request, stage, chunk, the sender's rank, the receiver's rank.
        ranked = re.search(rf"_{re.escape(from_stage)}_\d+_(\d+)_\d+$", key)
        return cls(from_stage, to_stage, f"kv{int(ranked[1])}" if ranked else "data")

    def request_of(self, key: str) -> str:
        """The request whose cache or chunk has a key; the key itself if it has another form."""
        cache = f"omni_{self.from_stage}_to_{self.to_stage}_kv_cache_"
        if key.startswith(cache):
            return key.removeprefix(cache)
        chunk = rf"(.+?)_{re.escape(self.from_stage)}_\d+(_\d+_\d+)?"  # with ranks, as above
        match = re.fullmatch(chunk, key, re.DOTALL)
        return match[1] if match else key

    @property
    def is_cache(self) -> bool:
        """Whether the edge carries KV caches."""
        return self.channel != "data"

    @property
    def rank(self) -> int:
        """The sender's rank, 0 for what has none."""
        return int(self.channel.removeprefix("kv")) if self.is_cache else 0

    def name(self, settings: OmniSettings) -> str:
        """The edge's name, unique in a deployment."""
        name = f"{settings.name}.{self.from_stage}-{self.to_stage}.{self.channel}"
        return f"{name}{REPLICA}{self.replica}" if self.replica else name

    def url(self, settings: OmniSettings) -> str:
        """The URL that the sender serves.

        Raises:
            SchemaError: `addresses` has no entry for this channel.
            UnavailableError: it has one, and this is a further replica.
        """
        if settings.transport == "shm":
            return f"shm://{self.name(settings)}"
        if settings.transport == "zmq+ipc":
            return f"zmq+ipc://{self._file(settings, 'ipc')}"
        if not settings.addresses:
            return f"{settings.transport}://127.0.0.1:0"
        if self.channel not in settings.addresses:
            raise SchemaError(
                f"addresses has {', '.join(settings.addresses)}, but not {self.channel!r}, "
                f"which stage {self.from_stage} needs to send to stage {self.to_stage}"
            )
        if self.replica:
            raise UnavailableError(
                f"replica {self.replica} of stage {self.from_stage} would send from the address of "
                "replica 0: leave addresses out, which replicas on one machine do not need, or set "
                "num_replicas: 1"
            )
        return f"{settings.transport}://{settings.addresses[self.channel]}"

    def url_file(self, settings: OmniSettings) -> str:
        """The file in which a sender announces a URL whose port the system chooses, or ""."""
        is_announced = settings.transport in ("zmq+tcp", "ucx") and not settings.addresses
        return self._file(settings, "url") if is_announced else ""

    def announcement(self, settings: OmniSettings) -> str:
        """The file by which receivers know that the edge is served, or "" with `addresses`."""
        return "" if settings.addresses else self._file(settings, "url")

    def served(self, settings: OmniSettings) -> list[StageEdge]:
        """The edges of all replicas that are served now, in their order."""
        if not (first := self._replace(replica=0).announcement(settings)):
            return []
        directory, name = os.path.split(first)
        stem, replicas = name.removesuffix(".url"), {0}
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as files:
            for file in files:
                match = re.fullmatch(rf"{re.escape(stem + REPLICA)}(\d+)\.url", file.name)
                if match:
                    replicas.add(int(match[1]))
        edges = [self._replace(replica=number) for number in sorted(replicas)]
        return [edge for edge in edges if announced(edge.announcement(settings))]

    def _file(self, settings: OmniSettings, suffix: str) -> str:
        directory = settings.of_sender.get("directory") or default_directory()
        return os.path.join(directory, f"{self.name(settings)}.{suffix}")


class Announcement:
    """A link's URL in a private file; it is valid while its writer holds a lock on the file.

    `allow_uids` are the other users who may read it, in a directory of their group.

    Raises:
        BusyError: another live sender has announced this name.
    """

    def __init__(self, path: str, url: str, allow_uids: Collection[int] = ()):
        check_private(os.path.dirname(path), allow_uids=allow_uids)
        draft = f"{path}.{os.getpid()}"
        self._path, self._fd = path, -1
        try:
            self._lock = LockFile(path)
        except BusyError:
            text = f"{path}: another sender has this name; set a different `name`"
            raise BusyError(text) from None
        try:
            self._fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            if allow_uids:
                os.fchmod(self._fd, 0o640)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.write(self._fd, url.encode())
            os.rename(draft, path)
            wake(path)
        except BaseException:
            self.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            raise
        _open.add(self)

    def close(self) -> None:
        """Remove the file unless another sender has replaced it; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self._path), os.fstat(fd)):
                    os.unlink(self._path)
            os.close(fd)
        self._lock.close()

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child; the file belongs to the parent."""
        os.close(self._fd)
        self._fd = -1


def announced(path: str) -> str:
    """The URL that a live sender has announced in a file, or ""."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(fd, 4096).decode()
    finally:
        os.close(fd)
    return ""


def find(path: str, *, timeout: float) -> str:
    """Block until a URL is announced in a file; its sender wakes the call.

    Raises:
        TransferTimeout: no sender announced one within `timeout` seconds.
    """
    check_private(os.path.dirname(path))
    deadline = time.monotonic() + timeout
    with WakeupFifo(path) as fifo:
        while True:
            changed = fifo.arm()
            if url := announced(path):
                return url
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not wait_readable(seconds, changed):
                text = f"no sender announced {path} within {format_seconds(timeout)}"
                raise TransferTimeout(text, waited=timeout, phase="connecting")


def _close_in_child() -> None:
    for announcement in list(_open):
        announcement.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
