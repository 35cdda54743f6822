"""Deliveries as views: of gets that hold no thread, and of what a producer keeps itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_kvlink.errors import WireError
from omni_kvlink.link.consumer import Received, Verify, check_verify

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.link.consumer import KVConsumer
    from omni_kvlink.link.producer import KVProducer
    from omni_kvlink.payload.header import TensorSpec


def open_delivery(
    consumer: KVConsumer, delivery: Delivery, *, started: float, verify: Verify = "auto"
) -> Received:
    """Check what `PendingGet.wait` returned and make views of it; `verify` as for `KVConsumer.get`.

    `started` is when the get began, on the clock of `time.perf_counter`; for the ledger. A payload
    that raises IntegrityError, VersionError or WireError is rejected at its producer.
    """
    check_verify(verify)
    copier, layouts = consumer._copier, consumer._layouts
    return Received(delivery, copier, layouts, started=started, verify=verify)


def contains_kept(producer: KVProducer, request_ids: Sequence[str]) -> Sequence[bool]:
    """Return whether this producer keeps each; one that it keeps counts as used."""
    producer._check_open()
    return producer._end.kept.contains(request_ids)


def open_kept(producer: KVProducer, request_id: str) -> Received | None:
    """Return a payload that this producer keeps, as views of the link's memory; None if it is gone.

    It is not evicted until it is released, and counts as used then. KVLinkError if the connector
    keeps no payloads.
    """
    producer._check_open()
    started = time.perf_counter()
    delivery = producer._end.kept.lend(request_id)
    if delivery is None:
        return None
    parts = delivery, producer._copier, producer._layouts
    return Received(*parts, started=started, verify="off")


def verify_part(received: Received, specs: Iterable[TensorSpec]) -> None:
    """Check these tensors, or beginnings of tensors, of a payload against their digests.

    It checks nothing that was checked on arrival. IntegrityError if a byte is wrong; the payload is
    rejected at its producer then.
    """
    delivery = received._delivery
    if not delivery.is_verified:
        try:
            part = received.manifest.only(specs)
            received._copier.verify(part, delivery.open_region())
        except WireError as error:
            delivery.reject(str(error))
            raise
