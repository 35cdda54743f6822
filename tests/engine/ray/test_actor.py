"""What runs in Ray's actors and needs no Ray: calls, their order, messages, the rendezvous."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import torch

from omni_kvlink import SchemaError, WireError
from omni_kvlink.engine.config import RayConfig, StageConfig
from omni_kvlink.engine.ipc.codec import pack_config, unpack_config
from omni_kvlink.engine.ipc.rpc import Call, Reply
from omni_kvlink.engine.parallel.process_group import join_rendezvous, open_rendezvous
from omni_kvlink.engine.ray.actor import ActorHandle, ActorHost, Message, Service, decode, encode
from support.engine.fixtures import config


class Echo(ActorHost):
    """Notes the first argument of each call, and answers with it."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []
        self.methods = {"echo": self._echo, "strange": self._strange}
        self._service = self
        self._methods.maps.append(self.methods)

    def make_service(self, config: StageConfig) -> Service:
        return self

    def close(self) -> None:
        self.called.append("close")

    def _echo(self, value: Any) -> Any:
        self.called.append(value)
        return value

    def _strange(self, value: Any) -> object:
        return object()


def message(method: str, *args: Any) -> Message:
    return encode(Call(7, method, list(args)))


def test_calls_run_in_their_order_however_they_arrive() -> None:
    host = Echo()

    async def call(numbers: list[int]) -> list[Any]:
        answers = [host.call(number, message("echo", number)) for number in numbers]
        return [decode(answer).value for answer in await asyncio.gather(*answers)]

    numbers = [3, 1, 4, 2, 0, 6, 5]
    assert asyncio.run(call(numbers)) == numbers
    assert host.called == sorted(numbers)


def test_the_caller_of_an_invalid_call_hears_of_it() -> None:
    """Its answer has no number; the handle knows which call it belongs to."""
    handle = object.__new__(ActorHandle)  # without Ray
    handle._answers = queue.SimpleQueue()
    answer: Future[Message] = Future()
    answer.set_result(encode(Reply(None, error=WireError("x"))))
    # Ray's thread calls it; an actor of this version gives no such answer.
    handle._on_answer(7, answer)
    received = handle.receive()
    assert received.number == 7
    assert isinstance(received.error, WireError)


def test_an_invalid_call_is_answered_with_an_error() -> None:
    host = Echo()

    async def call(*messages: Any) -> list[Any]:
        return [decode(await host.call(number, one)) for number, one in enumerate(messages)]

    shutdown, *wrong = asyncio.run(
        call(
            message("shutdown"),
            (b"\xc1", []),
            (msgspec.msgpack.encode([1]), []),
            (msgspec.msgpack.encode({"~": "Popen"}), []),
            (msgspec.msgpack.encode({"~": "tensor", "large": 0, "shape": [1]}), []),
            message("strange", 1),
            (msgspec.msgpack.encode({"number": 1}), []),
            message("_echo", 1),
        )
    )
    assert shutdown == Reply(7)
    assert host.called == ["close"]
    kinds = [type(one.error) for one in wrong[1:]]
    assert kinds == [WireError] * 3 + [SchemaError, WireError, AttributeError]
    assert isinstance(wrong[0].error, Exception)
    host._methods.maps.pop()  # as before `open`
    early = asyncio.run(host.call(8, message("echo", 1)))
    assert isinstance(decode(early).error, AttributeError)


def test_large_tensors_are_sent_beside_the_message() -> None:
    large = torch.arange(1 << 17, dtype=torch.int32).reshape(2, -1)
    packed, large_arrays = encoded = encode(Reply(1, {"a": large, "b": torch.ones(3)}))
    assert len(packed) < 1000
    assert [one.nbytes for one in large_arrays] == [1 << 19]
    large_arrays[0].flags.writeable = False  # as arrays from the object store are
    decoded = decode(encoded).value
    assert torch.equal(decoded["a"], large)
    assert torch.equal(decoded["b"], torch.ones(3))
    decoded["a"].zero_()
    assert large[1, -1] == (1 << 17) - 1
    with pytest.raises(SchemaError, match="object"):
        encode(Reply(1, object()))
    with pytest.raises(SchemaError, match="encoded"):
        encode(Reply(1, 1 << 70))


def test_the_rendezvous_listens_at_one_address_only() -> None:
    where = open_rendezvous("127.0.0.2")
    stores: list[Any] = [None, None]

    def join(rank: int) -> None:
        stores[rank] = join_rendezvous(where, rank, 2)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[0].set("a", "b")
    assert stores[1].get("a") == b"b"
    port = int(where.rpartition(":")[2])
    assert [address for address in listening() if address[1] == port] == [("127.0.0.2", port)]


def listening() -> list[tuple[str, int]]:
    """Return where this process listens; another one may have the same port at another address."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket
            sock = socket.socket(fileno=int(number))
            is_inet = sock.family in (socket.AF_INET, socket.AF_INET6)
            if is_inet and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(sock.getsockname()[:2])
            sock.detach()
    return found


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"strategy": "NEAR"}, "STRICT_SPREAD"),
        ({"address": "ray://x:1"}, "host:port"),
        ({"num_cpus": 0}, "needs something"),
        ({"num_gpus": -1}, "num_gpus=-1: wanted a number from 0"),
        ({"resources": {"x": -1}}, "resources.x=-1: wanted a number from 0"),
    ],
)
def test_an_invalid_ray_config_is_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        RayConfig(**fields)


def test_the_ray_config_is_part_of_the_encoded_config() -> None:
    one = config(None, ray=RayConfig(resources={"near": 0.5}, num_gpus=0.25))
    assert unpack_config(pack_config(one)) == one
