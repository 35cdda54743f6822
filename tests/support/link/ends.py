"""The connector behind an end of a link, for tests that act where no call of the link does.

They hold up its loop, cut its connection, or change a function of it. A link has no public name for
its connector: what may be known of it is in `stats()`, and another connector has other insides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from omni_kvlink.lowlevel import Copier

if TYPE_CHECKING:
    from omni_kvlink import KVConsumer, KVProducer
    from omni_kvlink.link import Received
    from omni_kvlink.link.end import LinkEnd
    from omni_kvlink.lowlevel import Delivery

CopierT = TypeVar("CopierT", bound=Copier)


def end_of(link: LinkEnd) -> Any:
    """Return the connector's producer or consumer."""
    return link._end  # not public: see above


def session_of(consumer: KVConsumer) -> Any:
    """Return the connection that the consumer has now; None before the first."""
    # Not public: a session ends with its connection, and the consumer opens another.
    return end_of(consumer)._session


def peers_of(producer: KVProducer) -> Any:
    """Return the connections of the producer's first listener; of a network, by routing id."""
    # `stats()` counts them and names their processes: a test that cuts one needs itself.
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
