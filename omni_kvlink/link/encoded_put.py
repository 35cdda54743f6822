"""`put_encoded`: puts a payload that is encoded already, such as a file's, byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.transfer import Ledger
from omni_kvlink.link.put_operation import PayloadPut

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link.producer import KVProducer
    from omni_kvlink.memory.region import Lease
    from omni_kvlink.payload.manifest import Manifest


class EncodedPut(PayloadPut):
    """A payload whose bytes, header and tensors, are copied to its lease as they are."""

    def __init__(self, manifest: Manifest, payload: memoryview):
        digests = "crc32c" if manifest.has_digests else "off"
        ledger = Ledger(nbytes=manifest.nbytes, copies=1, digests=digests, seconds={})
        super().__init__(manifest.request_id, manifest.nbytes, ledger)
        self._payload = payload

    def pack(self) -> None:
        """Have the bytes travel inside the offers."""
        self.packed = bytes(self._payload)

    def fill(self, lease: Lease) -> None:
        """Copy the bytes, unless they are packed."""
        if not self.packed:
            lease.region.write(0, self._payload)


def put_encoded(
    producer: KVProducer,
    manifest: Manifest,
    payload: memoryview,
    *,
    readers: int | None = 1,
    ttl: float | None = None,
    timeout: float = 10.0,
) -> Receipt:
    """Put the bytes of a payload, of which `manifest` is the header, under its request id.

    Header and digests are sent as they are: who was the producer and which bytes were committed
    stays what it was. Arguments, errors and the time at which it returns are those of
    `KVProducer.put`.
    """
    operation = producer._begin(readers, ttl, timeout, manifest.has_digests)
    put = EncodedPut(manifest, payload)
    if manifest.nbytes <= operation.producer.inline_limit:
        put.pack()
    return operation.run([put])[0]


def fail_missing(producer: KVProducer, key: str, reason: str) -> None:
    """Make the gets that wait for a key raise MissingError, unless it has a payload.

    Unlike after `KVProducer.fail`, later gets may wait again.
    """
    producer._check_open()
    producer._end.kept.fail_missing(key, reason)
