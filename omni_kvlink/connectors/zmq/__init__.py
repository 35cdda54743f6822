"""`zmq+tcp://host:port`, `zmq+ipc:///path`: payloads in chunks over ZMQ, also to other machines."""

from functools import partial

from ...memory import Mapping
from ..base import Backend, Options
from ..producer import PooledProducer
from .consumer import ZmqConsumer
from .door import ZmqDoor
from .endpoint import Endpoint


def _serve(transport: str, address: str, options: Options) -> PooledProducer:
    endpoint = Endpoint(transport, address)
    opener = partial(ZmqDoor, endpoint, options)
    return PooledProducer(endpoint.url, options, Mapping.anonymous, opener)


def _connect(transport: str, address: str, options: Options, timeout: float) -> ZmqConsumer:
    consumer = ZmqConsumer(Endpoint(transport, address), options)
    try:
        consumer.connect(timeout)
    except BaseException:
        consumer.close()
        raise
    return consumer


TCP = Backend(serve=partial(_serve, "tcp"), connect=partial(_connect, "tcp"))
IPC = Backend(serve=partial(_serve, "ipc"), connect=partial(_connect, "ipc"))
