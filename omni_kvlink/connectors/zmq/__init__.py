"""`zmq+tcp://host:port`, `zmq+ipc:///path`: payloads in chunks over ZMQ, also to other machines."""

from functools import partial

from ..base import Backend, Options
from .consumer import ZmqConsumer
from .endpoint import Endpoint
from .producer import ZmqProducer


def _serve(transport: str, address: str, options: Options) -> ZmqProducer:
    return ZmqProducer(Endpoint(transport, address), options)


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
