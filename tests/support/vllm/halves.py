"""The parts of a vLLM connector; vLLM calls the connector alone, so that none of them is public.

A test asks one of them what the connector adds up for vLLM, or has a link of it fail.
"""

from __future__ import annotations

from typing import Any


def saver_of(connector: Any) -> Any:
    """Return the part that sends caches; None of a consumer."""
    return connector._saver  # not public: see above


def loader_of(connector: Any) -> Any:
    """Return the part that receives caches; None of a producer."""
    return connector._loader  # not public: see above


def sender_of(connector: Any) -> Any:
    """Return the part that sends encoder outputs; None of a consumer."""
    return connector._sender  # not public: see above


def link_of(part: Any) -> Any:
    """Return the link by which a saver or a sender puts."""
    # Not public: a put past the connector would be of no request that vLLM knows.
    return part._link


def pools_of(saver: Any) -> Any:
    """Return what it sends of, one for each group of heads that a rank of the consumer has."""
    return saver._pools  # not public: only the saver copies from them


def declined_reads(loader: Any) -> Any:
    """Return the reads that it requests in order to give them back, by request and key."""
    # Not public: that they end is what the test waits for, and vLLM is not told.
    return loader._decliner._reads
