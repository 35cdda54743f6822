"""`zmq+tcp://host:port` and `zmq+ipc:///path`: payloads by lanes, or the control channel."""

from functools import partial

from omni_kvlink.connectors.base import Backend, Consumer, Options
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.control.consumer import ControlConsumer, keep_freed_memory
from omni_kvlink.connectors.control.listener import ChunkSender, ControlListener
from omni_kvlink.connectors.control.tcp_sender import TcpSender
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.memory.mapping import Mapping

_SENDERS = {"tcp": TcpSender, "ipc": ChunkSender}


def _serve(protocol: str, location: str, options: Options) -> PooledProducer:
    address = ControlAddress(protocol, location)
    opener = partial(ControlListener, address, options, senders=[_SENDERS[protocol]])
    return PooledProducer(address.url, options, Mapping.anonymous, opener)


def _connect(protocol: str, location: str, options: Options, timeout: float) -> Consumer:
    keep_freed_memory()
    return ControlConsumer(ControlAddress(protocol, location), options).connect(timeout)


TCP = Backend(serve=partial(_serve, "tcp"), connect=partial(_connect, "tcp"))
IPC = Backend(serve=partial(_serve, "ipc"), connect=partial(_connect, "ipc"))
