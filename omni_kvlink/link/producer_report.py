"""`ProducerReport`: the payloads that a live producer keeps, for its owner."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.protocol.messages import MAX_TEXT, LivePayload
from omni_kvlink.errors import SchemaError
from omni_kvlink.link.consumer import inspect_page
from omni_kvlink.system.waits import Deadline

if TYPE_CHECKING:
    from omni_kvlink.link.consumer import KVConsumer


@dataclasses.dataclass(frozen=True)
class ProducerReport:
    """The payloads that a producer keeps, and its numbers.

    Attributes:
        payloads: in the order in which they were put.
        transfers: numbers of transfers, as `stats()["transfers"]` of the producer.
        memory: bytes and counts, as `stats()["memory"]` of the producer: `quota`, `mapped`, `used`,
            `arenas`, `blocks`, and the calls that are `waiting` for memory.
    """

    payloads: tuple[LivePayload, ...]
    transfers: dict[str, int]
    memory: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by their names, as JSON values."""
        payloads = [payload.to_dict() for payload in self.payloads]
        return {"payloads": payloads, "transfers": self.transfers, "memory": self.memory}


def inspect_producer(consumer: KVConsumer, *, prefix: str = "", timeout: float) -> ProducerReport:
    """Ask the producer at the other end what it keeps; for tools of the producer's owner.

    That is who runs as the producer's user or as root, over shared memory and a Unix socket; over
    TCP who connects with the producer's own key. Payloads whose key begins with `prefix` are
    reported. No payload is received, leased or changed. The answer comes in pages of up to 256
    payloads, between which the producer serves others: what is put or released meanwhile may be in
    it or not. What has ended, and is held by a reader that is connected, is not in it.

    Blocks for `timeout` seconds at most, and runs in any thread.

    Raises:
        ConnectorError: this process has not the owner's rights; the text says how to get them.
        VersionError: the producer is of an earlier version.
        TransferTimeout: it did not answer in time.
        PeerLostError: the producer is gone.
        UnavailableError: the connector of this link cannot ask; `inproc://` and others.
        SchemaError: the prefix is no key's.
    """
    if not isinstance(prefix, str) or len(prefix) > MAX_TEXT or _has_surrogates(prefix):
        raise SchemaError(f"prefix={prefix!r}: a text with which keys begin")
    deadline = Deadline(timeout)
    page = first = inspect_page(consumer, 0, prefix, timeout=deadline.seconds_left())
    payloads = list(page.payloads)
    while page.resume:
        left = deadline.seconds_left()
        page = inspect_page(consumer, page.resume, prefix, timeout=left)
        payloads += page.payloads
    return ProducerReport(tuple(payloads), first.transfers, first.memory)


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)
