"""`ucx://host:port`: messages over the control channel, a payload's bytes by UCX."""

from __future__ import annotations

from functools import partial

from omni_kvlink.connectors.base import Backend, Consumer, Options
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.control.listener import ControlListener
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.connectors.ucx.consumer import UcxConsumer
from omni_kvlink.connectors.ucx.payload_memory import PayloadMemory
from omni_kvlink.connectors.ucx.sender import UcxSender

INSTALL = "pip install 'omni-kvlink[ucx]'"


def unavailable() -> str | None:
    """Return why UCX cannot be used here, with the cure, or None if it can.

    It imports ucxx, which is slow and changes the environment; call it only when UCX is wanted.
    """
    try:
        from omni_kvlink.connectors.ucx.worker import forked_child, load

        load()
    except ImportError as error:
        return f"ucxx does not load ({error}); {INSTALL}"
    except Exception as error:  # the C++ side reports a broken installation by many types
        return f"ucxx is broken ({type(error).__name__}: {error}); {INSTALL}"
    return forked_child() or None


def _serve(location: str, options: Options) -> PooledProducer:
    address = ControlAddress("tcp", location, "ucx")
    memory = PayloadMemory.of_link(address, options)
    senders = [partial(UcxSender, device=memory.device)]
    opener = partial(ControlListener, address, options, senders=senders)
    is_one_arena = bool(memory.device)
    producer = PooledProducer(address.url, options, memory.make, opener, is_one_arena=is_one_arena)
    producer.device, producer.host_reason = memory.device, memory.host_reason
    if memory.device:
        producer.inline_limit = 0
    return producer


def _connect(location: str, options: Options, timeout: float) -> Consumer:
    return UcxConsumer(ControlAddress("tcp", location, "ucx"), options).connect(timeout)


BACKEND = Backend(serve=_serve, connect=_connect, unavailable=unavailable)
