"""`zmq+tcp://host:port`, `zmq+ipc:///path`: payloads in chunks over ZMQ, also to other machines."""

from functools import partial

from omni_kvlink.connectors.base import Backend, Options
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.connectors.zmq.consumer import ZmqConsumer
from omni_kvlink.connectors.zmq.listener import ZmqListener
from omni_kvlink.memory.region import Mapping


def _serve(transport: str, address: str, options: Options) -> PooledProducer:
    endpoint = ControlAddress(transport, address)
    opener = partial(ZmqListener, endpoint, options)
    return PooledProducer(endpoint.url, options, Mapping.anonymous, opener)


def _connect(transport: str, address: str, options: Options, timeout: float) -> ZmqConsumer:
    consumer = ZmqConsumer(ControlAddress(transport, address), options)
    try:
        consumer.connect(timeout)
    except BaseException:
        consumer.close()
        raise
    return consumer


TCP = Backend(serve=partial(_serve, "tcp"), connect=partial(_connect, "tcp"))
IPC = Backend(serve=partial(_serve, "ipc"), connect=partial(_connect, "ipc"))
