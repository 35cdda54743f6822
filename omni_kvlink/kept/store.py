"""`PayloadStore`: keeps payloads for other processes, in memory and in files."""

from __future__ import annotations

import contextlib
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import ClosedError, KVLinkError
from omni_kvlink.kept.payload_directory import PayloadDirectory
from omni_kvlink.kept.store_contents import StoreContents
from omni_kvlink.kept.store_messages import Attachment, read_attachment
from omni_kvlink.kept.store_writer import StoreWriter
from omni_kvlink.kept.writer_policy import WriterPolicy
from omni_kvlink.link import KVLink, fail_missing, open_producer
from omni_kvlink.settings import Size
from omni_kvlink.system.threads import start_thread

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from omni_kvlink.link import LinkOptions

MAX_WRITERS = 64
"""Processes that one store fetches from at once; each takes a thread."""
_MAX_REQUESTS = 4096
"""Requests of processes that wait to be attached."""
_LOADERS = 2
"""Threads that read files."""
_DRAIN_SECONDS = 60.0
"""In which a store connects to itself, to write what is in memory alone."""


class PayloadStore:
    """Serves kept payloads, which it fetches from the processes that offer them.

    A `StoreClient` names itself by a get of a key; see `store_messages`. The store then connects to
    the client's own link, if its `writers` allow that URL, and fetches what is offered there. With
    a directory each payload is written to a file, too. A get of a key that is in a file alone waits
    until a thread has loaded it into memory. A context manager, which closes.

    Args:
        url: to serve.
        budget: bytes of memory, or a text such as "64GiB".
        files: the directory of files; None for none. Another store may not use it meanwhile.
        files_budget: bytes of all files together, or a text.
        writers: patterns of the URLs that the store may connect to; see `WriterPolicy`.
        options: as of `KVLink.serve`.

    Raises:
        BusyError, FileError, ConnectorError: as `PayloadDirectory` and `KVLink.serve`.
        SchemaError: an argument is not valid.
    """

    def __init__(
        self,
        url: str,
        *,
        budget: int | str,
        files: str | os.PathLike[str] | None = None,
        files_budget: int | str = "1TiB",
        writers: Sequence[str] = (),
        **options: Unpack[LinkOptions],
    ):
        size = Size(least=1)
        nbytes = size.read(files_budget, "files_budget")
        options["quota"] = size.read(budget, "budget")
        self.policy, self._options = WriterPolicy(url, writers, {**options}), options
        self._requests: SimpleQueue[str | None] = SimpleQueue()
        self._loading = set[str]()
        self._changing = threading.Lock()
        self._writers: dict[str, StoreWriter] = {}
        self._closed = False
        directory = None if files is None else PayloadDirectory(files, nbytes)
        self.contents = StoreContents(directory)  # before its link, whose first get may ask for it
        try:
            self._link = self.contents.link = open_producer(url, options, backing=self)
        except BaseException:
            if directory is not None:
                directory.close()
            raise
        self._threads = [
            threading.Thread(target=self._answer_all, name="kvlink-store", daemon=True)
            for _ in range(_LOADERS)
        ]
        for thread in self._threads:
            start_thread(thread)

    @property
    def url(self) -> str:
        """The URL that is served, with the port that was chosen."""
        return self._link.url

    def stats(self) -> dict[str, Any]:
        """The payloads in memory and in files, the writers, and counters since the start."""
        with self._changing:
            writers = [writer.stats() for writer in self._writers.values()]
        return {**self.contents.stats(), "writers": writers, "link": self._link.stats()}

    def close(self) -> None:
        """Leave the writers, write what is in memory alone to the directory, and end the link."""
        with self._changing:
            was_closed, self._closed = self._closed, True
            writers = list(self._writers.values())
        if was_closed:
            return
        for writer in writers:
            writer.close()
        try:
            self._drain()
        finally:
            for _ in self._threads:
                self._requests.put(None)
            self._link.close()
            for thread in self._threads:
                thread.join()
            if self.contents.directory is not None:
                self.contents.directory.close()

    def __enter__(self) -> PayloadStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PayloadStore at {self.url}>"

    # The contract of `Backing`: called with the link's lock held

    def holds(self, key: str) -> bool:
        """Whether there is a file of this key."""
        return self.contents.is_filed(key)

    def holds_other_identity(self, key: str) -> bool:
        """Whether there is a file of the key's name under another identity."""
        directory = self.contents.directory
        return directory is not None and directory.has_other_identity(key)

    def request(self, key: str) -> bool:
        """Have a key that is not in memory loaded, or its writer attached; False if it is none."""
        if self.contents.is_filed(key):
            if key not in self._loading:
                self._loading.add(key)
                self._requests.put(key)
            return True
        if read_attachment(key) is None or self._requests.qsize() >= _MAX_REQUESTS:
            return False
        self._requests.put(key)
        return True

    def _answer_all(self) -> None:
        with contextlib.suppress(ClosedError):  # the store ends
            while (key := self._requests.get()) is not None:
                attachment = read_attachment(key)
                if attachment is not None:
                    self._attach(attachment)
                else:
                    self._load(key)

    def _load(self, key: str) -> None:
        """Load a file, or tell the gets that wait for it why they have waited in vain."""
        self._loading.discard(key)  # first: a get that comes from here on finds it, or asks again
        if reason := self.contents.load(key):
            fail_missing(self._link, key, reason)

    def _attach(self, attachment: Attachment) -> None:
        options = self.policy.options_for(attachment.url)
        with self._changing:
            if self._closed or attachment.key in self._writers:
                return
            writers = self._writers.values()
            former = [one for one in writers if one.attachment.url == attachment.url]
        for writer in former:  # a process that this one has succeeded at its URL
            writer.close()
        with self._changing:
            if self._closed or attachment.key in self._writers:
                return
            is_full = len(self._writers) >= MAX_WRITERS
            if options is not None and not is_full:
                writer = StoreWriter(attachment, options, self.contents, self._detach)
                self._writers[attachment.key] = writer
                return
        reason = f"it may not connect to {attachment.url}: start it with --writers"
        if is_full:
            reason = f"it has {MAX_WRITERS} writers already: start another store"
        self._link.fail(attachment.key, reason)

    def _detach(self, writer: StoreWriter) -> None:
        """Forget a writer that is gone; one that waits all the same attaches itself again."""
        with self._changing:
            self._writers.pop(writer.attachment.key, None)
            if self._closed:
                return
        with contextlib.suppress(ClosedError):
            fail_missing(self._link, writer.attachment.key, f"the store lost it: {writer.reason}")

    def _drain(self) -> None:
        if self.contents.directory is None:
            return
        with (
            contextlib.suppress(KVLinkError),
            KVLink.connect(self.url, timeout=_DRAIN_SECONDS, **self._options) as reader,
        ):
            self.contents.write_rest(reader)
