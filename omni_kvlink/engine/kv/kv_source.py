"""`KVSource`: the link from which a stage receives the KV of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_kvlink import KVConsumer, KVPayload, Received, TensorTransferData, Verify
from omni_kvlink.engine.kv.device_copy import empty_like
from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import begin_get, open_delivery

if TYPE_CHECKING:
    import torch


def kv_payload(received: Received) -> KVPayload:
    """The KV that a payload holds; raises SchemaError if it holds other tensors."""
    if isinstance(received.data, TensorTransferData):
        raise SchemaError(
            f"payload {received.data.request_id!r} holds a TensorTransferData; expected KV caches"
        )
    return received.data


class ReceivedKV:
    """A request's KV in the link's memory, where it takes `nbytes`."""

    def __init__(self, received: Received):
        self._received, self.nbytes = received, received.manifest.nbytes

    def to(self, device: torch.device) -> KVPayload:
        """Views of the link's memory on the CPU, else a copy that is verified meanwhile."""
        data = kv_payload(self._received)
        if device.type != "cpu":
            self._received.scatter(data := empty_like(data, device))
            self.release()
        return data

    def release(self) -> None:
        """Release the link's memory; idempotent."""
        self._received.release()


class KVSource:
    """Receives the KV of each request as one payload over one link, which `close` closes."""

    def __init__(self, link: KVConsumer):
        self.link = link

    def begin_get(self, request_id: str, *, timeout: float) -> Any:
        """Request a KV without waiting for it; a lost producer may come back within `timeout`.

        Returns a `PendingGet`, or an object with its `future`, `wait` and `cancel`.
        """
        return begin_get(self.link, request_id, timeout=timeout)

    def open(self, delivery: Any, *, started: float, verify: Verify) -> ReceivedKV:
        """Check a KV for which a get has waited, and make views; after an error nothing is held.

        `started` is when the waiting began, on `time.perf_counter`'s clock.
        """
        return ReceivedKV(open_delivery(self.link, delivery, started=started, verify=verify))

    def abort(self, request_id: str, reason: str) -> None:
        """Tell the producer to keep no KV for this consumer; raises ClosedError once closed."""
        self.link.abort(request_id, reason)

    def timeout_hint(self, request_id: str) -> str:
        """Return what the error of a KV that did not come is to add."""
        return ""

    def close(self) -> None:
        """Close the link."""
        self.link.close()
