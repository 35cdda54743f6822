"""`ucx://host:port`: control over ZMQ, a payload's bytes by UCX."""

from __future__ import annotations

from functools import partial

from omni_kvlink.connectors.base import Backend, Options
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.connectors.ucx.access_policy import endpoint_of
from omni_kvlink.connectors.ucx.consumer import UcxConsumer
from omni_kvlink.connectors.ucx.listener import UcxListener
from omni_kvlink.memory.region import Mapping

INSTALL = "pip install 'omni-kvlink[ucx]'"


def unavailable() -> str | None:
    """Why UCX cannot be used here, with the cure, or None if it can; imports ucxx, so ask late."""
    try:
        from omni_kvlink.connectors.ucx.worker import load

        load()
    except ImportError as error:
        return f"ucxx does not load ({error}); {INSTALL}"
    except Exception as error:  # its C++ side reports a broken installation in many types
        return f"ucxx is broken ({type(error).__name__}: {error}); {INSTALL}"
    return None


def _serve(address: str, options: Options) -> PooledProducer:
    endpoint = endpoint_of(address)
    opener = partial(UcxListener, endpoint, options)
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
