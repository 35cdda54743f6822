"""`Recorder`: one end of a link that writes each payload that passes to a directory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from omni_kvlink.inspection.recording import Recording

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from typing_extensions import Self

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import KVConsumer, KVProducer, Received, ReceivedBatch
    from omni_kvlink.payload.bundle import Payload


class Recorder:
    """Stands for a `KVConsumer` or a `KVProducer`, and records what `get` and `put` carry.

    `consumer = Recorder(KVLink.connect(url, timeout=5.0), "recording")`; every name of the end is
    one of the recorder, with the same arguments and errors. `get` and `get_many` record the bytes
    that arrived, `put` and `put_many` the caller's tensors as they are when the call begins. What
    goes by streams, by `lowlevel` and by asyncio passes, and is not recorded. The call takes longer
    by the time of writing the file; FileError if that cannot be written, and then nothing was put,
    or it was released unread.
    """

    def __init__(self, end: KVConsumer | KVProducer, directory: str | os.PathLike[str]):
        self.end, self.recording = end, Recording(directory)

    def get(self, request_id: str, **options: Any) -> Received:
        """Do what `KVConsumer.get` does, and record the payload."""
        started = time.monotonic()
        received: Received = self.end.get(request_id, **options)
        self._add([received], started)
        return received

    def get_many(self, request_ids: Iterable[str], **options: Any) -> ReceivedBatch[Received]:
        """Do what `KVConsumer.get_many` does, and record the payloads."""
        started = time.monotonic()
        batch: ReceivedBatch[Received] = self.end.get_many(request_ids, **options)
        self._add(batch, started)
        return batch

    def put(self, data: Payload, **options: Any) -> Receipt:
        """Record the payload, and do what `KVProducer.put` does."""
        self.recording.add(data.save, "put", time.monotonic())
        receipt: Receipt = self.end.put(data, **options)
        return receipt

    def put_many(self, payloads: Iterable[Payload], **options: Any) -> list[Receipt]:
        """Record the payloads, and do what `KVProducer.put_many` does."""
        listed = list(payloads)
        for data in listed:
            self.recording.add(data.save, "put", time.monotonic())
        receipts: list[Receipt] = self.end.put_many(listed, **options)
        return receipts

    def _add(self, received: Iterable[Received], started: float) -> None:
        listed = list(received)
        try:
            for payload in listed:
                self.recording.add(payload.save, "get", started)
        except BaseException:
            for payload in listed:
                payload.release_unread()
            raise

    def __getattr__(self, name: str) -> Any:
        """The end's own."""
        return getattr(self.end, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end.close()

    def __repr__(self) -> str:
        return f"<Recorder of {self.end!r} in {str(self.recording.directory)!r}>"
