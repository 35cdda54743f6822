"""`ucx://host:port`: control over ZMQ, a payload's bytes by UCX."""

from __future__ import annotations

from functools import partial

from ...memory import Mapping
from ..base import Backend, Options
from ..producer import PooledProducer
from .consumer import UcxConsumer
from .door import UcxDoor
from .exposure import endpoint_of

INSTALL = "pip install 'omni-kvlink[ucx]'"


def unavailable() -> str | None:
    """Why UCX cannot be used here, with the cure, or None if it can; imports ucxx, so ask late."""
    try:
        from .worker import load

        load()
    except ImportError as error:
        return f"ucxx does not load ({error}); {INSTALL}"
    except Exception as error:  # its C++ side reports a broken installation in many types
        return f"ucxx is broken ({type(error).__name__}: {error}); {INSTALL}"
    return None


def _serve(address: str, options: Options) -> PooledProducer:
    endpoint = endpoint_of(address)
    opener = partial(UcxDoor, endpoint, options)
    return PooledProducer(endpoint.url, options, Mapping.anonymous, opener)


def _connect(address: str, options: Options, timeout: float) -> UcxConsumer:
    consumer = UcxConsumer(address, options)
    try:
        consumer.connect(timeout)
    except BaseException:
        consumer.close()
        raise
    return consumer


BACKEND = Backend(serve=_serve, connect=_connect, unavailable=unavailable)
