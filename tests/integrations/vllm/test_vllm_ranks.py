"""Engines of several ranks: each rank's part of a cache, and what the end of one rank ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from omni_kvlink import KVLink
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.testing.rig import until
from support.vllm.engine_process import BLOCK, PATIENCE, SEND, EngineProcess, oracle, prompt

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(1800),
]

UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Two ranks share a NUMA node here, which vLLM's own binding of threads does not foresee."""

TOKENS, OTHERS = prompt(3 * BLOCK + 7, seed=3), prompt(2 * BLOCK + 9, seed=4)

FOREVER = 3600
"""Seconds; who waits so long for a dead rank does not end in these tests."""


def ranks(tensor: int = 1, pipeline: int = 1) -> dict[str, Any]:
    return {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "distributed_executor_backend": "mp",
        "num_gpu_blocks_override": 64,
        "env": UNBOUND,
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0)


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def test_as_a_local_prefix_cache_hit(start: Any, layout: tuple[int, int]) -> None:
    """Synchronous: bit for bit. Asynchronous, where only the last token is computed: as near."""
    producer = start("p", "producer", **ranks(*layout))
    try:
        for load in ("sync", "async"):
            consumer = start("d", "consumer", extra={"load": load}, **ranks(*layout))
            try:
                compare(producer, consumer, load)
            finally:
                consumer.close()
    finally:
        producer.close()


def compare(producer: EngineProcess, consumer: EngineProcess, load: str) -> None:
    free = producer.call("free_blocks")
    for length in (5, BLOCK, 3 * BLOCK + 7):
        tokens = prompt(length, seed=length)
        expected = oracle(consumer, tokens)
        got = consumer.generate(tokens, producer.prefill(tokens))
        here = (length - 1) // BLOCK * BLOCK if load == "sync" else length
        assert (got["reason"], got["cached"]) == ("length", here)
        assert got["tokens"] == expected["tokens"]
        if load == "sync":
            assert got["logprobs"] == expected["logprobs"]
        assert difference(got, expected) < 1e-4
        assert consumer.call("forget")
    producer.call("settle")
    producer.call("forget")
    assert producer.call("free_blocks") == free


@pytest.mark.parametrize(("senders", "receivers"), [(2, 1), (1, 2)])
def test_engines_of_other_sizes(start: Any, senders: int, receivers: int) -> None:
    """A rank reads a half of another one's heads, or those of two: the CPU's kernel can use them.

    The sums over ranks are rounded otherwise on either side: equal tokens, as near as that allows.
    """
    producer = start("p", "producer", extra={"peer_tp": receivers}, **ranks(senders))
    consumer = start("d", "consumer", extra={"peer_tp": senders}, **ranks(receivers))
    try:
        for length in (5, 3 * BLOCK + 7):
            tokens = prompt(length, seed=length)
            expected = oracle(consumer, tokens)
            got = consumer.generate(tokens, producer.prefill(tokens))
            assert (got["reason"], got["cached"]) == ("length", length)
            assert got["tokens"] == expected["tokens"]
            assert difference(got, expected) < 1e-4
            assert consumer.call("forget")
        producer.call("settle")
        assert consumer.count("received") == 2 * receivers
    finally:
        producer.close()
        consumer.close()


def test_a_peer_of_another_size(start: Any) -> None:
    """It is refused by name, and the request ends: peer_tp was not set."""
    producer = start("p", "producer", **ranks(2))
    consumer = start("d", "consumer")
    try:
        tokens = prompt(2 * BLOCK + 5)
        got = consumer.generate(tokens, producer.prefill(tokens))
        assert (got["reason"], got["tokens"]) == ("error", [])
        assert "tp_size is 2 there and 1 here; peer_tp is" in consumer.output()
    finally:
        producer.close()
        consumer.close()


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("moment", ["idle", "computing"])
def test_a_rank_of_the_producer_is_killed(
    start: Any, directory: Path, load: str, moment: str
) -> None:
    """The consumer's request ends on all ranks, and the producer's own with its engine.

    "computing": the neighbour waits for the dead rank in a collective call, and ends: by itself, or
    by vLLM where that is faster. Requests without that producer go on, and the next producer of
    its name is found.
    """
    producer = start("p", "producer", **ranks(2))
    consumer = start("d", "consumer", extra={"load": load, "timeout": FOREVER}, **ranks(2))
    others = start("q", "producer"), start("e", "consumer", extra={"peers": ["shm://q"]})
    pids = producer.call("rank_pids")
    try:
        free, cold = consumer.call("free_blocks"), consumer.generate(TOKENS)
        consumer.call("forget")
        with ThreadPoolExecutor(2) as threads:
            key = f"late-{time.monotonic_ns()}"
            running = threads.submit(consumer.generate, TOKENS, {**fetch(key), "readers": 2})
            until_waiting(producer, running)
            if moment == "computing":
                sending = threads.submit(compute_without, pids[1], producer, key)
                until_computing(key, directory)
            moved = others[1].generate(TOKENS, others[0].prefill(TOKENS))
            killed = time.monotonic()
            os.kill(pids[1], signal.SIGKILL)
            got = running.result(PATIENCE)
            print(f"the consumer's request ended {since(killed)} after the rank")
            if moment == "computing":
                with pytest.raises((RuntimeError, EOFError)):
                    sending.result(PATIENCE)
                print(f"the producer's request ended {since(killed)} after the rank")
                until(lambda: not is_alive(pids[0]), "the neighbour ended", timeout=PATIENCE)
        assert (got["reason"], got["tokens"]) == ("error", [])
        assert moved["tokens"] == cold["tokens"]
        consumer.call("settle")
        assert consumer.call("free_blocks") == free
        assert others[1].generate(OTHERS, others[0].prefill(OTHERS))["reason"] == "length"
        producer.close()
        producer = start("p", "producer", **ranks(2))
        assert consumer.generate(TOKENS, producer.prefill(TOKENS))["tokens"] == cold["tokens"]
    finally:
        for engine in (producer, consumer, *others):
            engine.close()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def compute_without(pid: int, producer: EngineProcess, key: str) -> None:
    """Stop a rank's process, then let its engine compute a cache for two readers."""
    os.kill(pid, signal.SIGSTOP)
    params = {**SEND, "transfer_id": key, "readers": 2}
    producer.generate(TOKENS, params, tokens=1)


def until_computing(key: str, directory: Path) -> None:
    """Until the first rank of `p` has announced a cache, and so is in the pass that computes it."""
    with KVLink.connect("shm://p", timeout=PATIENCE, directory=str(directory)) as link:
        pending = begin_get(link, key, timeout=PATIENCE, streamed=True)
        assert wait([pending.future], PATIENCE).done
        pending.wait(timeout=0.0).release_unread()


def since(moment: float) -> str:
    return f"{1e3 * (time.monotonic() - moment):.0f} ms"


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def fetch(key: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": key, "remote_url": "shm://p"}


def until_waiting(producer: EngineProcess, running: Future[Any]) -> None:
    """Until a reader waits at each rank of the producer."""

    def is_waiting() -> bool:
        assert not running.done(), running.result()
        return bool(producer.call("waiting"))

    until(is_waiting, "the consumer's ranks wait", timeout=PATIENCE)
