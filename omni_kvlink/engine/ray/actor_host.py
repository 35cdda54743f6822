"""`ActorHost`: what runs inside a Ray actor, and what crosses to it and back."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from omni_kvlink.engine.config import C, StageConfig
from omni_kvlink.engine.entrypoints.stage_configs import NODE
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.ipc.codec import (
    flat_bytes,
    form_of,
    from_inline,
    inline,
    pack,
    unpack,
    unpack_config,
)
from omni_kvlink.engine.ipc.futures import settle
from omni_kvlink.engine.ipc.process_handle import Call
from omni_kvlink.engine.ipc.shm_tensors import SMALL
from omni_kvlink.engine.parallel.rendezvous import open_meeting
from omni_kvlink.engine.ray.cluster import library
from omni_kvlink.errors import SchemaError, WireError

Message: TypeAlias = tuple[bytes, list[Any]]
"""MessagePack, and the bytes of large tensors: Ray's object store takes these as they are."""


class ActorHost(ABC):
    """The class of an actor: does what a `ActorHandle` calls, in the order in which it was called.

    Ray promises no order; calls are numbered. One thread does them, and an answer may come later.

    Args:
        rank: of the worker that will be here, if it is one.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._service: Call | None = None
        self._next = 0
        self._early: dict[int, tuple[Message, Future[Message]]] = {}
        self._calls: queue.SimpleQueue[tuple[Message, Future[Message]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="calls", daemon=True).start()

    @abstractmethod
    def make(self, config: StageConfig) -> Call:
        """Make the service that this actor is for; how it is called."""

    @abstractmethod
    def end(self) -> None:
        """Give everything back; the actor is killed next."""

    async def alive(self) -> None:
        """Never answers: who waits for it hears when the actor is gone."""
        await asyncio.Event().wait()

    async def call(self, number: int, message: Message) -> Message:
        """One call, and its answer: {"value"} or {"error"}."""
        sent: Future[Message] = Future()
        self._early[number] = message, sent
        while self._next in self._early:
            self._calls.put(self._early.pop(self._next))
            self._next += 1
        return await asyncio.wrap_future(sent)

    # In the thread of calls: first, what is asked before there is a service.

    def meet(self) -> str:
        """Where ranks will meet, if this is the first of them."""
        return "" if self.rank else open_meeting(_address())

    def open(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Make the service; where it is."""
        self._service = self.make(unpack_config(config))
        return {"pid": os.getpid(), "address": _address()}

    def _serve(self) -> None:
        while True:
            message, sent = self._calls.get()
            answer: Future[Any] = Future()
            settle(answer, partial(self._do, message))
            answer.add_done_callback(partial(_say, sent))

    def _do(self, message: Message) -> Any:
        called = read(message)
        method, args = called["method"], called["args"]
        if method in ("meet", "open", "end"):
            return getattr(self, method)(*args)
        if self._service is None:
            raise EngineError(f"{method}: nothing was opened in this actor")
        return self._service(method, args, called["kwargs"])


def _say(sent: Future[Message], answer: Future[Any]) -> None:
    error = answer.exception()
    if error is None:
        try:
            sent.set_result(write({"value": answer.result()}))
            return
        except SchemaError as unsent:
            error = unsent
    sent.set_result(write({"error": error}))


def write(value: dict[str, Any]) -> Message:
    """Raises SchemaError if there is something in it that cannot cross."""
    large: list[Any] = []

    def stow(tensor: torch.Tensor) -> dict[str, Any]:
        if tensor.numel() * tensor.element_size() < SMALL:
            return inline(tensor)
        large.append(flat_bytes(tensor))
        return {**form_of(tensor), "large": len(large) - 1}

    try:
        return msgspec.msgpack.encode(pack(value, stow)), large
    except (ValueError, OverflowError) as error:
        raise SchemaError(f"a message cannot be written: {error}") from None


def read(message: Message) -> dict[str, Any]:
    """What was written; its tensors are copies, and the object store has its memory again.

    Raises:
        WireError: nobody has written that.
    """
    words, large = message

    def fetch(values: Mapping[str, Any]) -> torch.Tensor:
        if "large" not in values:
            return from_inline(values)
        number = values["large"]
        if not 0 <= number < len(large) or not isinstance(large[number], np.ndarray):
            raise WireError(f"tensor {number} of {len(large)} that came with a message")
        return from_inline({**values, "bytes": large[number]})

    found = unpack(msgspec.msgpack.decode(words), fetch)
    if not isinstance(found, dict):
        raise WireError(f"a message is a map, not {type(found).__name__}")
    return found


def at_node(config: C) -> C:
    """The same with this node's address in its URLs."""
    address = _address()
    return config.served_at(tuple(url.replace(NODE, address) for url in config.kv.sinks))


def _address() -> str:
    """Of the node that this actor is on."""
    return str(library().util.get_node_ip_address())
