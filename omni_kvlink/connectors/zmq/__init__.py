"""`zmq+tcp://host:port` and `zmq+ipc:///path`: payloads in chunks over the control channel."""

from functools import partial

from omni_kvlink.connectors.base import Backend, Consumer, Options
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.control.listener import ControlListener
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.connectors.zmq.consumer import ZmqConsumer, keep_freed_memory
from omni_kvlink.connectors.zmq.sender import ZmqSender
from omni_kvlink.memory.region import Mapping


def _serve(protocol: str, location: str, options: Options) -> PooledProducer:
    address = ControlAddress(protocol, location)
    opener = partial(ControlListener, address, options, senders=[ZmqSender])
    return PooledProducer(address.url, options, Mapping.anonymous, opener)


def _connect(protocol: str, location: str, options: Options, timeout: float) -> Consumer:
    keep_freed_memory()
    return ZmqConsumer(ControlAddress(protocol, location), options).connect(timeout)


TCP = Backend(serve=partial(_serve, "tcp"), connect=partial(_connect, "tcp"))
IPC = Backend(serve=partial(_serve, "ipc"), connect=partial(_connect, "ipc"))
