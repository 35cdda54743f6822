"""`RpcChannel`: plain values, and large tensors in shared memory."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import CapacityError, PeerLostError, SchemaError, WireError
from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.ipc.channel import RpcChannel
from omni_kvlink.engine.ipc.codec import unpack
from omni_kvlink.engine.ipc.rpc import Call
from omni_kvlink.engine.ipc.shm_tensors import INLINE_NBYTES, ShmTensorReader
from omni_kvlink.engine.kv.kv_state import KVState
from omni_kvlink.engine.outputs import BatchRunnerOutput, DiffusionOutput, RunnerOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("leaves_nothing")
BIG = 4 * INLINE_NBYTES


@pytest.fixture
def ends() -> Iterator[tuple[RpcChannel, RpcChannel]]:
    here, there = (RpcChannel(sock, quota=4 << 20) for sock in socket.socketpair())
    yield here, there
    here.close()
    there.close()
    here.join()
    there.join()


def reads(channel: RpcChannel) -> None:
    """Let a thread receive and ignore messages until the channel closes."""

    def read() -> None:
        with contextlib.suppress(PeerLostError):
            while True:
                channel.receive()

    threading.Thread(target=read, daemon=True).start()


def stats(channel: RpcChannel) -> dict[str, int]:
    """Use of the shared memory for tensors that are sent from here."""
    # A channel counts messages; how much of the memory they hold is no figure of an engine.
    return channel._tensors_out._pool.stats()


def used(channel: RpcChannel) -> int:
    deadline = time.monotonic() + 120
    while stats(channel)["used"] and time.monotonic() < deadline:
        time.sleep(0.005)
    return stats(channel)["used"]


def filled(seed: int, dtype: torch.dtype = torch.uint8, numel: int = BIG) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.complex64]
)
@pytest.mark.parametrize("numel", [0, 1, 100, BIG])
def test_tensors_of_any_dtype_and_size_arrive(
    ends: tuple[RpcChannel, RpcChannel], dtype: torch.dtype, numel: int
) -> None:
    here, there = ends
    one = filled(1, dtype, numel)
    here.send({"one": one, "scalar": torch.tensor(7, dtype=dtype)})
    got = there.receive()
    assert torch.equal(got["one"], one)
    assert got["one"].dtype is dtype
    assert got["scalar"].shape == ()
    assert got["one"].is_contiguous()


def test_large_tensors_anywhere_in_a_message(ends: tuple[RpcChannel, RpcChannel]) -> None:
    here, there = ends
    image = filled(1).reshape(64, -1, 4)
    output = DiffusionOutput("r", output=image, stages=[DiffusionOutput("r", output=image[:, 1])])
    sideways = image.transpose(0, 1)
    here.send({"batch": BatchRunnerOutput([RunnerOutput("r", output)]), "also": ({"x": sideways},)})
    reads(here)
    got = there.receive()
    result = got["batch"].runner_outputs[0].result
    assert torch.equal(result.output, image)
    assert torch.equal(result.stages[0].output, image[:, 1])
    assert torch.equal(got["also"][0]["x"], sideways)
    assert used(here) == 0
    result.output.fill_(1)  # it does not share memory with the message


def test_the_memory_is_reused(ends: tuple[RpcChannel, RpcChannel]) -> None:
    here, there = ends
    reads(here)
    for seed in range(20):
        here.send({"one": filled(seed), "two": filled(-seed)})
        got = there.receive()
        assert torch.equal(got["one"], filled(seed))
        assert torch.equal(got["two"], filled(-seed))
        assert used(here) == 0
    assert stats(here)["arenas"] == 1
    assert stats(there)["mapped"] == 0  # no tensor was sent from there


def test_small_tensors_use_no_shared_memory(ends: tuple[RpcChannel, RpcChannel]) -> None:
    here, there = ends
    here.send({"one": filled(1, numel=INLINE_NBYTES - 1)})
    assert torch.equal(there.receive()["one"], filled(1, numel=INLINE_NBYTES - 1))
    assert stats(here)["mapped"] == 0


def test_arenas_are_replaced_by_larger_ones(ends: tuple[RpcChannel, RpcChannel]) -> None:
    here, there = ends
    reads(here)
    for size in (1 << 20, 3 << 20, 4 << 20, 1 << 20):
        here.send({"one": filled(size, numel=size)})
        assert torch.equal(there.receive()["one"], filled(size, numel=size))
        assert used(here) == 0
    assert stats(here)["mapped"] <= stats(here)["quota"]


def test_more_than_the_quota_is_an_error(
    ends: tuple[RpcChannel, RpcChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_kvlink.engine.ipc.shm_tensors._RESERVE_TIMEOUT", 0.1)
    here, there = ends
    with pytest.raises(CapacityError, match="send less at once") as caught:
        here.send({"small": filled(1), "large": torch.zeros(5 << 20, dtype=torch.uint8)})
    assert caught.value.requested == 5 << 20
    assert stats(here)["used"] == 0
    here.send({"large": filled(2, numel=3 << 20)})
    with pytest.raises(CapacityError, match="send less at once"):  # the first is not received yet
        here.send({"large": filled(3, numel=3 << 20)})
    reads(here)
    assert torch.equal(there.receive()["large"], filled(2, numel=3 << 20))
    assert used(here) == 0
    here.send({"large": filled(3, numel=3 << 20)})
    assert torch.equal(there.receive()["large"], filled(3, numel=3 << 20))


def test_a_send_that_waits_for_memory_continues(ends: tuple[RpcChannel, RpcChannel]) -> None:
    here, there = ends
    reads(here)
    got: list[Any] = []

    def receive() -> None:
        got.extend(there.receive()["one"] for _ in range(6))

    receiver = threading.Thread(target=receive)
    here.send({"one": filled(0, numel=3 << 20)})
    receiver.start()
    for seed in range(1, 6):
        here.send({"one": filled(seed, numel=3 << 20)})
    receiver.join(120)
    assert [torch.equal(one, filled(seed, numel=3 << 20)) for seed, one in enumerate(got)] == (
        [True] * 6
    )


def test_a_send_that_waits_for_memory_fails_when_the_peer_closes(
    ends: tuple[RpcChannel, RpcChannel],
) -> None:
    here, there = ends
    here.send({"one": filled(0, numel=3 << 20)})
    reads(here)
    threading.Timer(0.1, there.close).start()
    with pytest.raises(EngineDeadError):  # not CapacityError, as when nothing is freed in time
        here.send({"one": filled(0, numel=3 << 20)})


def test_send_does_not_block_on_a_peer_that_does_not_read(
    ends: tuple[RpcChannel, RpcChannel],
) -> None:
    here, there = ends
    for number in range(20):
        here.send({"number": number, "text": "a fox " * 20_000})
    assert [there.receive()["number"] for _ in range(20)] == list(range(20))


def test_many_send_at_once(ends: tuple[RpcChannel, RpcChannel]) -> None:
    here, there = ends
    reads(here)
    senders = [
        threading.Thread(target=here.send, args=({"seed": seed, "one": filled(seed)},))
        for seed in range(24)
    ]
    for sender in senders:
        sender.start()
    got = [there.receive() for _ in senders]
    assert sorted(one["seed"] for one in got) == list(range(24))
    assert all(torch.equal(one["one"], filled(one["seed"])) for one in got)


def test_all_that_was_sent_is_read_before_the_end(ends: tuple[RpcChannel, RpcChannel]) -> None:
    here, there = ends
    for number in range(50):
        here.send({"number": number, "text": "x" * 50_000})
    here.close()
    assert [there.receive()["number"] for _ in range(50)] == list(range(50))
    with pytest.raises(PeerLostError):
        there.receive()
    with pytest.raises(EngineDeadError):
        here.send({})


@pytest.mark.parametrize(
    "what",
    [KVState.READY, {1.5: 2}, {"~": "tuple"}, object(), frozenset("a"), 1 << 70, "\ud800"],
)
def test_a_value_that_cannot_be_encoded_fails_the_send(
    ends: tuple[RpcChannel, RpcChannel], what: Any
) -> None:
    here, there = ends
    with pytest.raises(SchemaError):
        here.send({"large": filled(1), "what": [what]})
    assert stats(here)["used"] == 0
    here.send({"next": filled(2)})
    assert torch.equal(there.receive()["next"], filled(2))


def test_values_that_pack_does_not_write_are_refused() -> None:
    with pytest.raises(WireError, match="Popen"):
        unpack({"~": "Popen", "args": "ls"})
    with pytest.raises(WireError, match="load"):
        unpack({"~": "tensor", "shape": [1], "dtype": "load", "bytes": b"1"})
    call = {"~": "Call", "number": 1, "method": "abort"}
    assert unpack({**call}) == Call(1, "abort")
    with pytest.raises(WireError, match="shell"):
        unpack({**call, "shell": True})
    with pytest.raises(WireError, match="int"):
        unpack({**call, "number": "1"})
    with pytest.raises(WireError, match="3 bytes"):
        unpack({"~": "tensor", "shape": [1], "dtype": "float32", "bytes": b"123"})


def test_an_arena_that_may_shrink_is_refused() -> None:
    inbox = ShmTensorReader()
    with pytest.raises(WireError, match="sealed"):
        inbox.add_arenas([0], [os.memfd_create("not sealed")], [])
    with pytest.raises(WireError, match="announced"):
        inbox.read([], {"shape": [1], "dtype": "uint8", "block": [0, 0, 4096]})
