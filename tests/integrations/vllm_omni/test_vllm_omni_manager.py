"""vLLM-Omni's own manager at both ends, in processes of their own, over each transport: exact."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.testing.rig import until
from support.vllm_omni.caches import LAYOUTS, Cache
from support.vllm_omni.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

TRANSPORTS = ["shm", "zmq+ipc", "zmq+tcp", "ucx"]
_names = itertools.count()


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Stage]]:
    stages = [Stage() for _ in range(3)]
    yield stages
    for stage in stages:
        stage.shutdown()


@pytest.fixture
def stages(processes: list[Stage]) -> Iterator[list[Stage]]:
    """Three processes without managers; what a test made is closed."""
    yield processes
    for stage in reversed(processes):  # senders last
        stage.call("close")


@pytest.fixture(params=TRANSPORTS)
def kvlink(request: pytest.FixtureRequest, sockets: str) -> dict[str, Any]:
    """Settings for each transport; the sockets' directory must be empty at the end."""
    return settings(request.param, sockets)


def settings(transport: str, sockets: str, **more: Any) -> dict[str, Any]:
    if transport == "ucx" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed: pip install 'omni-kvlink[ucx]'")
    is_ucx = transport == "ucx"
    options = {"directory": sockets, "quota": 64 << 20, "trusted_network": is_ucx}
    return {"transport": transport, "name": f"t{next(_names)}", "options": options, **more}


def pair(stages: list[Stage], kvlink: dict[str, Any]) -> tuple[Stage, Stage]:
    sender, receiver, _ = stages
    assert sender.call("make", role="sender", kvlink=kvlink)
    assert receiver.call("make", role="receiver", kvlink=kvlink)
    return sender, receiver


def send(stage: Stage, request: str, cache: Cache, **more: Any) -> None:
    stage.call("send", request=request, cache=dataclasses.asdict(cache), **more)


def until_it_waits(sender: Stage) -> None:
    """Return when a receiver waits for a payload that the sender does not have."""

    def waits() -> bool:
        links = sender.call("health", role="sender")["links"]
        return any(link["transfers"]["waiting"] for link in links)

    until(waits, "a receiver waits")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_arrives_exactly(
    layout: str, dtype: str, kvlink: dict[str, Any], stages: list[Stage]
) -> None:
    """Blocks out of order, the last one partly filled; then again, in memory that was used."""
    sender, receiver = pair(stages, kvlink)
    for seed in (1, 2):
        cache = Cache(layout, dtype, seed=seed)
        about = {"kv_lens": [27], "ropes": [5], "image_shape": [64, 48], "prompt": "ein Füchslein"}
        send(sender, f"r{seed}", cache, metadata=about)
        got = receiver.call("receive", request=f"r{seed}")
        assert got["layers"] == cache.expected()
        assert got["metadata"] == {
            "block_size": 8,
            "num_layers": 3,
            "dtype": dtype,
            "seq_len": 27,
            **about,
        }
        assert (got["request_id"], got["block_ids"]) == (f"r{seed}", [9, 2, 7, 0])


@pytest.mark.parametrize("length", [1, 7, 8, 9, 32])
def test_lengths_around_a_block(length: int, sockets: str, stages: list[Stage]) -> None:
    sender, receiver = pair(stages, settings("shm", sockets))
    cache = Cache(seq_len=length)
    send(sender, "r", cache)
    assert receiver.call("receive", request="r")["layers"] == cache.expected()


@pytest.mark.parametrize("layout", ["stacked", "packed"])
def test_one_rank_to_two(layout: str, kvlink: dict[str, Any], stages: list[Stage]) -> None:
    sender, *receivers = stages
    sender.call("make", role="sender", kvlink=kvlink, tp=(1, 2))
    for rank, receiver in enumerate(receivers):
        receiver.call("make", role="receiver", kvlink=kvlink, tp=(1, 2), rank=rank)
        receiver.begin("receive", request="r")
    cache = Cache(layout, "bfloat16")
    send(sender, "r", cache)
    for rank, receiver in enumerate(receivers):
        expected = dataclasses.replace(cache, shard=rank, shards=2).expected()
        assert receiver.result()["layers"] == expected


@pytest.mark.parametrize("layout", ["stacked", "packed"])
def test_two_ranks_to_one(layout: str, kvlink: dict[str, Any], stages: list[Stage]) -> None:
    receiver, *senders = stages
    receiver.call("make", role="receiver", kvlink=kvlink, tp=(2, 1))
    cache = Cache(layout, "bfloat16")
    for rank, sender in enumerate(senders):
        sender.call("make", role="sender", kvlink=kvlink, tp=(2, 1), rank=rank)
    receiver.begin("receive", request="r")
    for rank, sender in reversed([*enumerate(senders)]):
        send(sender, "r", dataclasses.replace(cache, shard=rank, shards=2))
    assert receiver.result()["layers"] == cache.expected()


def test_two_ranks_to_two(kvlink: dict[str, Any], stages: list[Stage]) -> None:
    """Rank to rank, in two processes: rank 1, whose names must not be rank 0's."""
    sender, receiver, _ = stages
    sender.call("make", role="sender", kvlink=kvlink, tp=(2, 2), rank=1)
    receiver.call("make", role="receiver", kvlink=kvlink, tp=(2, 2), rank=1)
    cache = Cache(shard=1, shards=2)
    send(sender, "r", cache)
    assert receiver.call("receive", request="r")["layers"] == cache.expected()


def test_a_waiting_receiver_is_woken(kvlink: dict[str, Any], stages: list[Stage]) -> None:
    """By the first `get`: none that returned before was followed by the manager's next look."""
    sender, receiver = pair(stages, {**kvlink, "wait": 60.0})
    for request in ("first", "second"):
        receiver.begin("receive", request=request)
        if request == "second":  # at first the sender serves nothing that could be asked
            until_it_waits(sender)
        send(sender, request, Cache())
        assert receiver.result()["layers"] == Cache().expected()
    assert receiver.call("health", role="receiver")["timeouts"] == 0


def test_several_readers_have_it_each(sockets: str, stages: list[Stage]) -> None:
    kvlink = settings("shm", sockets, readers=2)
    sender, *receivers = stages
    sender.call("make", role="sender", kvlink=kvlink)
    for receiver in receivers:
        receiver.call("make", role="receiver", kvlink=kvlink)
        receiver.begin("receive", request="r")
    send(sender, "r", Cache())
    assert [one.result()["layers"] for one in receivers] == [Cache().expected()] * 2
    until(lambda: sender.call("health", role="sender")["unread"] == 0, "both let go")


@pytest.mark.parametrize("cache", [Cache(block_ids=(9, 2, 99, 0)), Cache(block_ids=(9, 2, 7))])
def test_a_short_cache_is_refused_and_nobody_waits(
    cache: Cache, kvlink: dict[str, Any], stages: list[Stage]
) -> None:
    """The manager leaves out block 99, which the pool does not have, and sends the rest."""
    sender, receiver = pair(stages, {**kvlink, "wait": 60.0})
    send(sender, "whole", Cache())
    assert receiver.call("receive", request="whole")["layers"] == Cache().expected()
    receiver.begin("receive", request="short")
    send(sender, "short", cache)
    assert receiver.result()["layers"] is None
    assert receiver.call("health", role="receiver")["timeouts"] == 0
    assert sender.call("health", role="sender")["failures"] > 0
    output = receiver.call("get", key="omni_0_to_1_kv_cache_short", timeout=5.0)
    assert output.startswith("TransferFailed")
    assert "24 tokens, but seq_len is 27" in output


def test_the_sender_dies_while_the_receiver_waits(
    kvlink: dict[str, Any], stages: list[Stage]
) -> None:
    """At once, and the next sender of this name is found."""
    killed, (_, receiver, sender) = Stage(), stages
    kvlink = {**kvlink, "wait": 60.0}
    killed.call("make", role="sender", kvlink=kvlink)
    receiver.call("make", role="receiver", kvlink=kvlink)
    send(killed, "r", Cache())
    assert receiver.call("receive", request="r")["layers"] == Cache().expected()
    receiver.begin("receive", request="lost")
    until_it_waits(killed)
    killed.kill()
    assert receiver.result()["layers"] is None
    health = receiver.call("health", role="receiver")
    assert (health["failures"], health["timeouts"]) == (1, 0)
    sender.call("make", role="sender", kvlink=kvlink)
    receiver.begin("receive", request="found")
    send(sender, "found", Cache(seed=3))
    assert receiver.result()["layers"] == Cache(seed=3).expected()
