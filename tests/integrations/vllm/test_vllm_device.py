"""Pools on a device: the bytes of each layout, and who waits for what. No engine thread may block.

The device is the fake one: what is enqueued on a stream runs when it is waited for. The tests
marked `gpu` are the same ones on a real device.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.devices import fake_device

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from vllm.v1.kv_cache_layout import KVCacheLayout

from omni_kvlink._native import cuda, host
from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.blocks import BlockShape, bytes_of_blocks
from omni_kvlink.integrations.vllm.saving import Saver
from omni_kvlink.integrations.vllm.step import FailedSave, StepMetadata
from omni_kvlink.testing.rig import until
from support.vllm.devices import EVERY, check_loaded, is_counted
from support.vllm.devices import device as device
from support.vllm.devices import library as library
from support.vllm.devices import worker as worker
from support.vllm.halves import pools_of, saver_of
from support.vllm.pools import (
    BLOCK,
    BLOCKS,
    ENGINE,
    FILLED,
    HEADS,
    LAYERS,
    SENT,
    SPECS,
    UNTOUCHED,
    PoolWorker,
    bytes_like,
    load,
    save,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Reaches into _end, _open: whether blocks are still read is what vLLM must not have to know.


pytestmark = [
    pytest.mark.skipif(bool(host.missing()), reason=host.missing() or ""),
    pytest.mark.timeout(300),
]
FAKE = pytest.mark.parametrize("device", ["fake"], indirect=True)


def combinations() -> Iterator[Any]:
    """Layout, kind of cache, and ranks of both sides; where vLLM itself has such a pool."""
    for layout in KVCacheLayout:
        for kind in SPECS:
            if "padded" in kind and not layout.is_block_compact:
                continue
            yield layout, kind, (1, 1)
        for ranks in ((2, 2), (1, 2), (2, 1)):
            for kind in ("bfloat16", "int8 per token", "latent"):
                yield layout, kind, ranks


def heads_of(kind: str, rank: int, ranks: int) -> slice:
    """The heads of a rank, of all `HEADS`; a latent is the same on each."""
    if ranks == 1 or "latent" in kind:
        return slice(None)
    return slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)


@EVERY
@pytest.mark.parametrize(
    ("layout", "kind", "ranks"),
    combinations(),
    ids=lambda each: each.name if isinstance(each, KVCacheLayout) else str(each),
)
def test_each_byte(
    worker: Callable[..., PoolWorker],
    device: Any,
    layout: KVCacheLayout,
    kind: str,
    ranks: tuple[int, int],
) -> None:
    """All of a block, what is packed beside K and V included, from the stream that computes it."""
    senders, receivers = ranks
    producers = [
        worker("producer", layout, kind, rank=rank, ranks=senders, peer_tp=receivers)
        for rank in range(senders)
    ]
    consumers = [
        worker("consumer", layout, kind, rank=rank, ranks=receivers, peer_tp=senders)
        for rank in range(receivers)
    ]
    for consumer in consumers:
        consumer.forward(load())
    for rank, producer in enumerate(producers):
        producer.forward(save(), bytes_like(producer, 7, heads_of(kind, rank, senders)), SENT)
    for rank, consumer in enumerate(consumers):
        consumer.run_until_loaded()
        check_loaded(consumer, bytes_like(consumer, 7, heads_of(kind, rank, receivers)))
    for each in (*producers, *consumers):
        if saver_of(each.worker) is not None and not pools_of(saver_of(each.worker)):
            continue  # another rank sends the latents
        until(lambda each=each: is_counted(each), "it was counted")  # type: ignore[misc]
        assert each.counts["pinned_bytes"] > 0
        assert each.counts["pageable_bytes"] == 0


@EVERY
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_blocks_of_the_kernel(
    worker: Callable[..., PoolWorker], device: Any, layout: KVCacheLayout
) -> None:
    """A block of vLLM is several of the kernel's: sent as it is, and only to an equal kernel."""
    producer = worker("producer", layout, kernel_block=BLOCK // 4)
    consumer = worker("consumer", layout, kernel_block=BLOCK // 4)
    sent = bytes_like(producer, 3)
    consumer.forward(load())
    producer.forward(save(), sent, SENT)
    consumer.run_until_loaded()
    check_loaded(consumer, sent)
    other = worker("consumer", layout, kernel_block=BLOCK // 2)
    producer.forward(save(request_id="s", key="other"), sent, SENT)
    other.forward(load(key="other"))
    other.run_until_loaded()
    assert other.invalid == set(FILLED)


@FAKE
def test_the_next_pass_does_not_wait_for_copies(
    worker: Callable[..., PoolWorker], device: Any
) -> None:
    """The device has computed nothing yet; a later pass writes behind the prompt's last token."""
    producer, consumer = worker("producer"), worker("consumer")
    sent, saver = bytes_like(producer, 1), saver_of(producer.worker)
    consumer.forward(load())
    device.hold(True)
    producer.forward(save(), sent, SENT)
    saver.hold({"r"})
    producer.forward(StepMetadata(), {layer: sent[layer][:1] for layer in LAYERS}, [9])
    assert saver.released() == set(), "its blocks were to be freed while they are copied"
    assert saver._open
    assert not producer.seen, "the device was to be held"
    device.hold(False)
    consumer.run_until_loaded()
    check_loaded(consumer, sent)
    until(lambda: saver.released() == {"r"}, "its blocks are free")


@FAKE
@pytest.mark.parametrize("reason", ["preempted", "aborted"])
def test_blocks_that_are_freed(
    worker: Callable[..., PoolWorker], device: Any, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """The pass that may overwrite them begins when no copy reads them any more."""
    producer, consumer = worker("producer"), worker("consumer")
    sent, saver, wait = bytes_like(producer, 1), saver_of(producer.worker), Saver.wait
    consumer.forward(load())
    device.hold(True)
    producer.forward(save(), sent, SENT)
    assert saver._open
    calls: list[set[str]] = []

    def waited(self: Saver, request_ids: set[str]) -> None:
        if "r" in request_ids:
            calls.append(request_ids)
            device.hold(False)
        wait(self, request_ids)

    monkeypatch.setattr(Saver, "wait", waited)
    overwritten = {layer: torch.zeros_like(sent[layer]) for layer in LAYERS}
    if reason == "preempted":
        producer.forward(StepMetadata(preempted={"r"}), overwritten, SENT)
    else:
        producer.forward(StepMetadata(failed=[FailedSave("r", "key", "gone")]), overwritten, SENT)
    assert calls
    assert not saver._open
    device.run(ENGINE)
    consumer.run_until_loaded()
    if reason == "preempted":  # else the consumer may have been told first
        check_loaded(consumer, sent)


@FAKE
def test_a_sleep_waits_for_copies(
    worker: Callable[..., PoolWorker], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pools' memory is discarded when no copy reads it any more; then it is used again."""
    producer, consumer = worker("producer"), worker("consumer")
    sent, saver, end = bytes_like(producer, 1), saver_of(producer.worker), Saver._end
    consumer.forward(load())
    device.hold(True)
    producer.forward(save(), sent, SENT)
    assert saver._open

    def ended(self: Saver, names: list[tuple[str, str]]) -> None:
        device.hold(False)
        end(self, names)

    monkeypatch.setattr(Saver, "_end", ended)
    producer.worker.unregister_kv_caches()
    assert not saver._open
    for layer in LAYERS:
        producer.bytes_of(layer).zero_()
    consumer.run_until_loaded()
    check_loaded(consumer, sent)
    producer.worker.restore_kv_caches()
    again = bytes_like(producer, 2)
    producer.forward(save(request_id="s", key="again"), again, SENT)
    consumer.forward(load(request_id="s", key="again"))
    device.run(ENGINE)
    consumer.run_until_loaded("s")
    check_loaded(consumer, again)


@FAKE
def test_blocks_that_are_not_held(worker: Callable[..., PoolWorker], device: Any) -> None:
    """Without `delay_free` the next pass may have them: the pass ends when they are copied."""
    producer, consumer = worker("producer", delay_free=False), worker("consumer")
    sent = bytes_like(producer, 1)
    producer.forward(save(), sent, SENT)
    assert not saver_of(producer.worker)._open
    overwritten = {layer: torch.zeros_like(sent[layer]) for layer in LAYERS}
    producer.forward(StepMetadata(), overwritten, SENT)
    device.run(ENGINE)
    consumer.forward(load())
    consumer.run_until_loaded()
    check_loaded(consumer, sent)


@FAKE
def test_the_pass_waits_for_loads_on_its_stream(
    worker: Callable[..., PoolWorker], device: Any
) -> None:
    """The whole pass is enqueued while nothing runs; each layer then finds its blocks filled."""
    producer, consumer = worker("producer"), worker("consumer")
    sent = bytes_like(producer, 5)
    producer.forward(save(), sent, SENT)
    until(lambda: saver_of(producer.worker).released() or idle_saver(producer), "it is committed")
    device.hold(True)
    consumer.forward(load(is_async=False))
    assert not consumer.seen
    assert not consumer.invalid
    device.hold(False)
    device.run(ENGINE)
    for layer in LAYERS:
        assert torch.equal(consumer.seen[layer][:2], sent[layer][:2]), "it did not wait"
        assert (consumer.seen[layer][2] == UNTOUCHED).all(), "the last block is computed"


def idle_saver(producer: PoolWorker) -> bool:
    return not saver_of(producer.worker)._open


@EVERY
def test_a_load_follows_the_engines_earlier_work(
    worker: Callable[..., PoolWorker], device: Any
) -> None:
    """A pass that still runs may write to blocks that were freed since."""
    producer, consumer = worker("producer"), worker("consumer")
    sent, old = bytes_like(producer, 1), bytes_like(consumer, 2)
    producer.forward(save(), sent, SENT)
    consumer.forward(StepMetadata(), old, FILLED)
    consumer.forward(load())
    consumer.run_until_loaded()
    device.run(ENGINE)
    check_loaded(consumer, sent)


@EVERY
@pytest.mark.parametrize("local", [BLOCK, 2 * BLOCK])
def test_what_the_prefix_cache_has_is_not_written(
    worker: Callable[..., PoolWorker], device: Any, local: int
) -> None:
    producer, consumer = worker("producer"), worker("consumer")
    sent = bytes_like(producer, 1)
    producer.forward(save(), sent, SENT)
    consumer.forward(load(local=local))
    consumer.run_until_loaded()
    here = local // BLOCK
    for layer in LAYERS:
        found = consumer.bytes_of(layer).cpu()[FILLED]
        assert torch.equal(found[here:], sent[layer][here:])
        assert (found[:here] == UNTOUCHED).all()


@FAKE
@pytest.mark.filterwarnings("ignore:the payload cannot be page-locked:RuntimeWarning")
def test_memory_that_cannot_be_page_locked(worker: Callable[..., PoolWorker], device: Any) -> None:
    """Then torch copies, and the statistics say so."""
    producer, consumer = worker("producer"), worker("consumer")
    sent = bytes_like(producer, 1)
    producer.forward(StepMetadata(), sent, SENT)
    device.run(ENGINE)  # torch's copies of the fake device's tensors follow no stream
    with device.set("refuses_registration", 1):
        producer.forward(save(), None, SENT)
        consumer.forward(load())
        consumer.run_until_loaded()
    check_loaded(consumer, sent)
    for each in (producer, consumer):
        until(lambda each=each: is_counted(each), "it was counted")  # type: ignore[misc]
        assert each.counts["pageable_bytes"] > 0
        assert each.counts["pinned_bytes"] == 0


def test_pieces_of_a_block() -> None:
    """Heads far apart; what overlaps, or is of no layout of vLLM, is refused."""
    memory = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)  # [H, B, N, C]
    found = bytes_of_blocks(memory.transpose(0, 1), "x", num_blocks=3, block_size=4)
    assert found.shape == (3, 2, 20)
    assert torch.equal(found[1, 1], memory[1, 1].flatten())
    assert found.data_ptr() == memory.data_ptr()
    overlapping = memory.as_strided((3, 2, 4, 5), (20, 10, 5, 1))
    with pytest.raises(SchemaError, match=r"layer x: .* has an unknown layout"):
        bytes_of_blocks(overlapping, "x", num_blocks=3, block_size=4)
    with pytest.raises(SchemaError, match=r"layer x: .* has an unknown layout"):
        bytes_of_blocks(memory.permute(1, 2, 0, 3)[:, ::2], "x", num_blocks=3, block_size=4)


def test_a_pool_that_is_not_its_specs() -> None:
    spec = SPECS["bfloat16"](HEADS)
    pool = torch.zeros(BLOCKS, HEADS, BLOCK, 32, dtype=torch.bfloat16)
    assert BlockShape.of(spec, pool, BLOCKS, "x").nbytes == spec.page_size_bytes
    for wrong in (pool.float(), pool[:, :2], pool.transpose(1, 2), pool[:-1]):
        with pytest.raises(SchemaError, match=r"layer x: a pool .* its FullAttentionSpec of 12"):
            BlockShape.of(spec, wrong, BLOCKS, "x")


def test_a_thread_that_was_told_not_to_block_is_noticed(library: Path) -> None:
    """The counter that these tests rely on."""
    with pytest.MonkeyPatch.context() as patch:
        made = fake_device.install(library, patch)
        before, ticket = made.get("blocking"), cuda.record(0, ENGINE)
        with made.without_blocking():
            thread = threading.Thread(target=ticket.wait)
            thread.start()
            thread.join()
            assert made.get("blocking") == before
            ticket.wait()
        assert made.get("blocking") == before + 1
        ticket.close()
