"""`ActorHost`: serves calls in a Ray actor. `ActorHandle`: the transport to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections import ChainMap
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np

from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.ipc.codec import (
    inline_tensor,
    pack,
    read_inline_tensor,
    tensor_bytes,
    tensor_spec,
    unpack,
    unpack_config,
)
from omni_kvlink.engine.ipc.rpc import Call, Reply, answer_call
from omni_kvlink.engine.ipc.shm_tensors import INLINE_NBYTES
from omni_kvlink.engine.parallel.process_group import open_rendezvous
from omni_kvlink.engine.ray.cluster import NODE, Cluster, library
from omni_kvlink.errors import PeerLostError, SchemaError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from omni_kvlink.engine.config import C, StageConfig

Message: TypeAlias = tuple[bytes, list[Any]]
"""MessagePack, and the bytes of large tensors, which Ray's object store holds without a copy."""

_MAX_CALLS = 1 << 20
"""Calls that may be pending at once; a request to a stage is one call from start to end."""


class ActorHandle:
    """An actor that this process starts in a cluster; an `RpcTransport`.

    Messages are encoded by the engine's own codec; Ray carries bytes. `options` are the actor's
    resources and placement. `pid` is 0 until the caller sets it to what `ActorHost.open` returned.
    """

    def __init__(
        self,
        host: type[ActorHost],
        cluster: Cluster,
        options: Mapping[str, Any],
        *,
        name: str,
        rank: int = 0,
    ):
        self.name, self.pid, self._cluster = name, 0, cluster
        self._sending = threading.Lock()
        self._order = itertools.count()
        self._closing: Future[Message] | None = None
        self._answers = queue.SimpleQueue[tuple[Any, Future[Message]] | None]()
        ray = library()
        self._kill_actor = ray.kill
        defaults = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _MAX_CALLS}
        self._actor = ray.remote(host).options(**defaults, **options).remote(rank)
        exited: Future[Message] = self._actor.wait_forever.remote().future()
        exited.add_done_callback(partial(self._on_answer, None))

    def send(self, message: Call) -> None:
        """Send a message; see `RpcTransport.send`."""
        # Ray's thread runs the callback, which must not block
        self._call(message).add_done_callback(partial(self._on_answer, message.number))

    def receive(self) -> Reply:
        """Wait for the next message; see `RpcTransport.receive`."""
        received = self._answers.get()
        if received is None:
            raise PeerLostError("Ray does not say why")
        number, answer = received
        error = answer.exception()
        if error is not None:
            raise PeerLostError(_shortened(str(error)))
        message: Reply = decode(answer.result())
        if message.number is None:  # the actor could not decode the call
            message = msgspec.structs.replace(message, number=number)
        return message

    def describe_exit(self, error: Exception) -> str:
        """Kill the actor, which may live on behind a broken network; say why it is gone."""
        self.kill()
        return f"{self.name}, a Ray actor, is gone: {error}"

    def shutdown(self) -> None:
        """Ask the actor to release everything; returns at once. `join` kills it then."""
        with contextlib.suppress(EngineDeadError):
            self._closing = self._call(Call(-1, "shutdown"))

    def kill(self) -> None:
        """Kill the actor's process; returns at once."""
        if self._cluster.is_connected:
            self._kill_actor(self._actor)

    def join(self, timeout: float) -> None:
        """Wait for up to `timeout` seconds until the actor has shut down, then kill it."""
        if self._closing is not None:
            wait([self._closing], timeout)
        self.kill()

    def close(self) -> None:
        """Let `receive` raise: Ray reports nothing more after `ray.shutdown`."""
        self._answers.put(None)

    def _on_answer(self, number: Any, answer: Future[Message]) -> None:
        self._answers.put((number, answer))

    def _call(self, message: Call) -> Future[Message]:
        encoded = encode(message)
        with self._sending:  # numbers must be sent in their order
            if not self._cluster.is_connected:
                raise EngineDeadError(f"{self.name}: this process has left the Ray cluster")
            reference = self._actor.call.remote(next(self._order), encoded)
        answer: Future[Message] = reference.future()
        return answer


class Service(Protocol):
    """The service of an `ActorHost`: `WorkerService` or `StageService`."""

    methods: dict[str, Callable[..., Any]]

    def close(self) -> object:
        """Release everything."""


class ActorHost(ABC):
    """Class of an actor: runs the calls of an `ActorHandle` in one thread, in their order.

    Ray does not keep the order of calls to an asynchronous actor, so calls are numbered.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._service: Service | None = None
        methods: dict[str, Callable[..., Any]] = {
            method.__name__: method for method in (self.open_rendezvous, self.open, self.shutdown)
        }
        self._methods = ChainMap(methods)
        self._next = 0
        self._backlog: dict[int, tuple[Message, Future[Message]]] = {}
        self._calls: queue.SimpleQueue[tuple[Message, Future[Message]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="calls", daemon=True).start()

    @abstractmethod
    def make_service(self, config: StageConfig) -> Service:
        """Make the service that this actor is for."""

    async def wait_forever(self) -> None:
        """Never return; Ray fails this call when the actor is gone."""
        await asyncio.Event().wait()

    async def call(self, number: int, message: Message) -> Message:
        """Queue call `number`, and return its answer."""
        reply: Future[Message] = Future()
        self._backlog[number] = message, reply
        while self._next in self._backlog:
            self._calls.put(self._backlog.pop(self._next))
            self._next += 1
        return await asyncio.wrap_future(reply)

    def open_rendezvous(self) -> str:
        """On rank 0, open the address where the ranks meet, and return its URL; else ""."""
        return "" if self.rank else open_rendezvous(node_address())

    def open(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Make the service, whose methods can be called from now on; say where it is."""
        self._service = self.make_service(unpack_config(config))
        self._methods.maps.append(self._service.methods)
        return {"pid": os.getpid(), "address": node_address()}

    def shutdown(self) -> None:
        """Release everything; the actor is killed next."""
        if self._service is not None:
            self._service.close()

    def _serve(self) -> None:
        while True:
            message, reply = self._calls.get()

            def send(answer: Reply, reply: Future[Message] = reply) -> None:
                reply.set_result(encode(answer))

            try:
                call = decode(message)
            except Exception as error:
                send(Reply(None, error=error))
            else:
                answer_call(self._methods, call, send)


def encode(value: Call | Reply) -> Message:
    """Encode a message; SchemaError if the codec does not encode something in it."""
    large: list[Any] = []

    def write(tensor: torch.Tensor) -> dict[str, Any]:
        if tensor.numel() * tensor.element_size() < INLINE_NBYTES:
            return inline_tensor(tensor)
        large.append(tensor_bytes(tensor))
        return {**tensor_spec(tensor), "large": len(large) - 1}

    try:
        return msgspec.msgpack.encode(pack(value, write)), large
    except (ValueError, OverflowError) as error:
        raise SchemaError(f"a message cannot be encoded: {error}") from None


def decode(message: Message) -> Any:
    """Decode a message; its tensors are copies, so that the object store can free its memory."""
    packed, large = message

    def read(values: Mapping[str, Any]) -> torch.Tensor:
        if "large" not in values:
            return read_inline_tensor(values)
        index = values["large"]
        if not 0 <= index < len(large) or not isinstance(large[index], np.ndarray):
            raise WireError(f"tensor {index} of {len(large)} that came with a message")
        return read_inline_tensor({**values, "bytes": large[index]})

    value = unpack(msgspec.msgpack.decode(packed), read)
    if not isinstance(value, (Call, Reply)):
        raise WireError(f"a message is a Call or an Reply, not {type(value).__name__}")
    return value


def at_node(config: C) -> C:
    """The configuration with this node's address in the URLs that it serves."""
    address = node_address()
    return config.served_at(tuple(url.replace(NODE, address) for url in config.kv.sinks))


def node_address() -> str:
    """Address of the node that this actor is on."""
    return str(library().util.get_node_ip_address())


def _shortened(text: str) -> str:
    """Cut the middle out of an error's text; Ray says at its ends what happened, and why."""
    text = " ".join(text.split())
    return text if len(text) < 500 else f"{text[:150]} … {text[-300:]}"
