"""What runs in Ray's actors and needs no Ray: calls and their order, messages, where ranks meet."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import torch
from engine_fixtures import config

from omni_kvlink import SchemaError, WireError
from omni_kvlink.engine import EngineError, RayConfig
from omni_kvlink.engine.ipc.codec import pack_config, unpack_config
from omni_kvlink.engine.parallel.rendezvous import join_meeting, open_meeting
from omni_kvlink.engine.ray.actor_host import ActorHost, read, write


class Echo(ActorHost):
    """Notes what is called, and answers with it."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []
        self._service = self._do_call

    def make(self, config: Any) -> Any:
        return self._do_call

    def end(self) -> None:
        self.called.append("end")

    def _do_call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        self.called.append(args[0])
        answer: Future[Any] = Future()
        answer.set_result(object() if method == "strange" else args[0])
        return answer


def called(method: str, *args: Any) -> Any:
    return write({"method": method, "args": list(args), "kwargs": {}})


def test_calls_are_done_in_their_order_however_they_come() -> None:
    host = Echo()

    async def come(numbers: list[int]) -> list[Any]:
        answers = [host.call(number, called("x", number)) for number in numbers]
        return [read(answer)["value"] for answer in await asyncio.gather(*answers)]

    numbers = [3, 1, 4, 2, 0, 6, 5]
    assert asyncio.run(come(numbers)) == numbers
    assert host.called == sorted(numbers)


def test_what_is_no_call_is_answered_with_an_error() -> None:
    host = Echo()

    async def come(*messages: Any) -> list[Any]:
        return [read(await host.call(number, one)) for number, one in enumerate(messages)]

    end, *wrong = asyncio.run(
        come(
            called("end"),
            (b"\xc1", []),
            (msgspec.msgpack.encode([1]), []),
            (msgspec.msgpack.encode({"~": "Popen"}), []),
            (msgspec.msgpack.encode({"~": "tensor", "large": 0, "shape": [1]}), []),
            called("strange", 1),
        )
    )
    assert end == {"value": None}
    assert [type(one["error"]) for one in wrong[1:]] == [WireError] * 3 + [SchemaError]
    assert isinstance(wrong[0]["error"], Exception)
    host._service = None
    early = asyncio.run(host.call(6, called("x", 1)))
    assert isinstance(read(early)["error"], EngineError)


def test_large_tensors_cross_beside_the_words() -> None:
    large = torch.arange(1 << 17, dtype=torch.int32).reshape(2, -1)
    words, beside = message = write({"a": large, "b": torch.ones(3)})
    assert len(words) < 1000
    assert [one.nbytes for one in beside] == [1 << 19]
    beside[0].flags.writeable = False  # as the object store gives it
    found = read(message)
    assert torch.equal(found["a"], large)
    assert torch.equal(found["b"], torch.ones(3))
    found["a"].zero_()
    assert large[1, -1] == (1 << 17) - 1
    with pytest.raises(SchemaError, match="object"):
        write({"a": object()})
    with pytest.raises(SchemaError, match="written"):
        write({"a": 1 << 70})


def test_ranks_meet_at_one_address_alone() -> None:
    where = open_meeting("127.0.0.2")
    stores: list[Any] = [None, None]

    def join(rank: int) -> None:
        stores[rank] = join_meeting(where, rank, 2)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    stores[0].set("a", "b")
    assert stores[1].get("a") == b"b"
    port = int(where.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"strategy": "NEAR"}, "STRICT_SPREAD"),
        ({"address": "ray://x:1"}, "host:port"),
        ({"num_cpus": 0}, "takes something"),
        ({"num_gpus": -1}, "below 0"),
        ({"resources": {"x": -1}}, "below 0"),
    ],
)
def test_a_place_that_cannot_be(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        RayConfig(**fields)


def test_where_a_stage_goes_travels_with_its_configuration() -> None:
    one = config(None, ray=RayConfig(resources={"near": 0.5}, num_gpus=0.25))
    assert unpack_config(pack_config(one)) == one
