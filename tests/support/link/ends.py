"""The connector behind an end of a link, for tests that hold up its loop or cut its connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from omni_kvlink.lowlevel import Copier

if TYPE_CHECKING:
    from omni_kvlink import KVConsumer, KVProducer
    from omni_kvlink.link import Received
    from omni_kvlink.link.end import LinkEnd
    from omni_kvlink.lowlevel import Delivery

# Reaches into _end, _peers, _session: what may be known of a connector is in the link's `stats()`;
# another connector has other insides, and the next connection another session.

CopierT = TypeVar("CopierT", bound=Copier)


def end_of(link: LinkEnd) -> Any:
    """Return the connector's producer or consumer."""
    return link._end


def session_of(consumer: KVConsumer) -> Any:
    """Return the connection that the consumer has now; None before the first."""
    return end_of(consumer)._session


def peers_of(producer: KVProducer) -> Any:
    """Return the connections of the producer's first listener; of a network, by routing id."""
    return end_of(producer).listeners[0]._peers


def use_copier(copier: CopierT, *links: LinkEnd) -> CopierT:
    """Have links that are open already copy with another copier, which is returned."""
    for link in links:
        link._copier = copier  # a link takes one when it is opened, and a fixture has done that
    return copier


def delivery_of(received: Received) -> Delivery:
    """Return the region that a payload has arrived in, and its lease."""
    # Not public: a reader has views of it. `lowlevel` shows it before the payload is opened.
    return received._delivery
