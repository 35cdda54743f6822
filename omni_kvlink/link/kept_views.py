"""Views of kept payloads: those of a producer's own, and digests of a part of one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_kvlink.errors import WireError
from omni_kvlink.link.consumer import Received

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omni_kvlink.link.producer import KVProducer
    from omni_kvlink.payload.header import TensorSpec


def contains_kept(producer: KVProducer, request_ids: Sequence[str]) -> Sequence[bool]:
    """Return whether this producer keeps each; one that it keeps counts as used."""
    producer._check_open()
    return producer._end.contains_kept(request_ids)


def open_kept(producer: KVProducer, request_id: str) -> Received | None:
    """Return a payload that this producer keeps, as views of the link's memory; None if it is gone.

    It is not evicted until it is released, and counts as used then. KVLinkError if the connector
    keeps no payloads.
    """
    producer._check_open()
    started = time.perf_counter()
    delivery = producer._end.lend_kept(request_id)
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
