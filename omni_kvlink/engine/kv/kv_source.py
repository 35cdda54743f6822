"""`KVSource`: the link from which a stage receives the KV of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from omni_kvlink import KVConsumer, KVLink, KVPayload, Received, TensorTransferData, Verify
from omni_kvlink.engine.kv.device_copy import empty_like
from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import begin_get, open_delivery

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from omni_kvlink.engine.config import KVConfig


class KVGet(Protocol):
    """A get in progress.

    Attributes:
        future: ends, in a thread of the connector, when the KV has come or will not come.
    """

    future: Future[Any]

    def cancel(self) -> None:
        """Stop waiting; a payload that came meanwhile goes back to the producer."""


def kv_payload(received: Received) -> KVPayload:
    """The KV that a payload holds.

    Raises:
        SchemaError: it holds other tensors.
    """
    if isinstance(received.data, TensorTransferData):
        raise SchemaError(
            f"payload {received.data.request_id!r} holds a TensorTransferData; expected KV caches"
        )
    return received.data


class ReceivedKV:
    """A request's KV in the link's memory.

    Attributes:
        nbytes: its size there.
    """

    def __init__(self, received: Received):
        self._received, self.nbytes = received, received.manifest.nbytes

    def to(self, device: torch.device) -> KVPayload:
        """The KV on a device: views of the link's memory on the CPU, else a verified copy.

        Raises:
            IntegrityError: the bytes are not those that were sent.
        """
        data = kv_payload(self._received)
        if device.type == "cpu":
            return data
        target = empty_like(data, device)
        self._received.scatter(target)
        self.release()
        return target

    def release(self) -> None:
        """Release the link's memory; idempotent."""
        self._received.release()


class KVSource:
    """Receives the KV of each request as one payload over one link.

    Args:
        link: the consumer's end; `close` closes it.
    """

    def __init__(self, link: KVConsumer):
        self.link = link

    @classmethod
    def connect(cls, config: KVConfig) -> KVSource:
        """Connect to the first of `config.sources`; blocks until it serves.

        Raises:
            TransferTimeout: it does not serve within `config.connect_timeout` seconds.
            UnavailableError, VersionError, ConnectorError: as `KVLink.connect`.
        """
        url, timeout = config.sources[0], config.connect_timeout
        return cls(KVLink.connect(url, timeout=timeout, **config.source_options))

    def begin_get(self, request_id: str, *, timeout: float) -> KVGet:
        """Request a KV from the producer, without waiting for it.

        Args:
            request_id: whose KV.
            timeout: seconds to reconnect in, if the producer is gone.

        Raises:
            PeerLostError: the producer is gone and did not come back in time.
        """
        return begin_get(self.link, request_id, timeout=timeout)

    def open(self, get: Any, *, started: float, verify: Verify) -> ReceivedKV:
        """Check a KV that has come, and make views of it; after an error nothing is held.

        Args:
            get: of `begin_get`; its future has ended.
            started: when the waiting began, on `time.perf_counter`'s clock.
            verify: as for `KVConsumer.get`.

        Raises:
            TransferFailed, PeerLostError: it did not come.
            IntegrityError, WireError: it is not what was sent.
        """
        delivery = get.wait(timeout=0.0)
        return ReceivedKV(open_delivery(self.link, delivery, started=started, verify=verify))

    def abort(self, request_id: str, reason: str) -> None:
        """Tell the producer to keep no KV for this consumer; raises ClosedError once closed."""
        self.link.abort(request_id, reason)

    def keys(self, request_id: str) -> list[str]:
        """The keys under which a request's KV is requested."""
        return [request_id]

    def stats(self) -> dict[str, Any]:
        """The statistics of each link, and how many gets wait in all."""
        links = [self.link.stats()]
        return {"waiting": links[0]["waiting"], "links": links}

    def close(self) -> None:
        """Close the link."""
        self.link.close()
