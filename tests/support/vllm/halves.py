"""The parts of a vLLM connector, for tests that ask one of them, or have a link of it fail."""

from __future__ import annotations

from typing import Any

# Reaches into _decliner, _link, _loader, _pools, _reads, _saver, _sender: vLLM calls the connector
# alone, which adds up what its parts have done.


def saver_of(connector: Any) -> Any:
    """Return the part that sends caches; None of a consumer."""
    return connector._saver


def loader_of(connector: Any) -> Any:
    """Return the part that receives caches; None of a producer."""
    return connector._loader


def sender_of(connector: Any) -> Any:
    """Return the part that sends encoder outputs; None of a consumer."""
    return connector._sender


def link_of(part: Any) -> Any:
    """Return the link by which a saver or a sender puts."""
    return part._link


def pools_of(saver: Any) -> Any:
    """Return what it sends of, one for each group of heads that a rank of the consumer has."""
    return saver._pools


def declined_reads(loader: Any) -> Any:
    """Return the reads that it requests in order to give them back, by request and key."""
    return loader._decliner._reads
