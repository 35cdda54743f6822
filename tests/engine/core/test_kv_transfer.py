"""Prefill and decode apart: a stage that reads prompts, and one that goes on from their K and V."""

from __future__ import annotations

import queue
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVConsumer, KVLink, SchemaError, TransferTimeout
from omni_kvlink.engine import (
    AREngine,
    DiffusionParallelConfig,
    EngineError,
    KVConfig,
    KVTransferConfig,
    OmniARConfig,
)
from omni_kvlink.engine.kv.kv_transfer import PeerConnections
from omni_kvlink.models.bagel import make_tiny_checkpoint
from support.engine.ar_stage import (
    TOLERANCE,
    Passes,
    SentKV,
    ar_engine,
    difference,
    kv_of,
    prompt,
    read_alone,
)
from support.engine.fixtures import WAIT, checkpoint, url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXT = "two owls in the rain, and the other thing by the sea"
SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3}
SAMPLED_ALONE: dict[str, Any] = {
    "max_think_tokens": 24,
    "do_sample": True,
    "temperature": 0.8,
    "seed": 3,
}
HOW: dict[str, Any] = {"think": True, "dtype": "float32", "num_blocks": 256, "block_size": 4}


def ends(sockets: str, **fields: Any) -> tuple[KVTransferConfig, KVTransferConfig]:
    """The configurations of a producer and of a consumer that know each other."""
    first, second = url(), url()
    how = {"options": {"directory": sockets}, "timeout": WAIT, **fields}
    return (
        KVTransferConfig("kv_producer", first, (second,), **how),
        KVTransferConfig("kv_consumer", second, (first,), **how),
    )


@contextmanager
def stages(
    sockets: str, backend: str = "uni", model: str = "", **fields: Any
) -> Iterator[tuple[AREngine, AREngine]]:
    """A prefill stage, by default in a process of its own, and a decode stage in this one."""
    give, take = ends(sockets)
    with ExitStack() as stack:
        config = OmniARConfig(
            model or checkpoint(),
            kv_transfer=give,
            distributed_executor_backend=backend,
            **{**HOW, **fields},
        )
        prefill = AREngine(config)
        stack.enter_context(prefill)
        decode = stack.enter_context(ar_engine(sockets, kv_transfer=take, **{**HOW, **fields}))
        yield prefill, decode


def test_an_absent_peer_keeps_no_other_one_waiting(sockets: str) -> None:
    """The first peer never serves; the second one is connected all the same."""
    how = {"options": {"directory": sockets}, "timeout": WAIT}
    absent, present = url(), url()
    config = KVTransferConfig("kv_producer", url(), (absent, present), **how)  # type: ignore[arg-type]
    with KVLink.serve(present, directory=sockets):
        connected = queue.SimpleQueue[KVConsumer]()
        peers = PeerConnections(config, connected.put)
        try:
            link = connected.get(timeout=WAIT)
            assert link.url == present
            peers.wait(0.0)
        finally:
            peers.close()
        link.close()


def test_a_peer_that_refuses_is_named_with_its_reason(sockets: str) -> None:
    """Its error is no wait: the text names no time that nobody waited."""
    peer = f"zmq+ipc://{sockets}/a.sock"
    how = {"options": {"keys": f"{sockets}/absent.secret"}, "timeout": WAIT}
    config = KVTransferConfig("kv_producer", url(), (peer,), **how)  # type: ignore[arg-type]
    peers = PeerConnections(config, lambda link: None)
    with pytest.raises(TransferTimeout, match=r"not connected to .*keys= .* go together") as caught:
        peers.wait(WAIT)
    peers.close()
    assert " within " not in str(caught.value)


def read(engine: AREngine, name: str, text: Any, **fields: Any) -> Any:
    output = engine.submit(prompt(name, text, **fields)).result(WAIT)
    if output.error is None:
        engine.fail_kv(name, "not needed")
    return output


def test_a_text_is_decoded_from_what_another_process_read(sockets: str) -> None:
    """No forward pass of the prompt is left; the tokens are those of one process."""
    with stages(sockets, "mp") as (prefill, decode):
        sent, passes = SentKV(decode), Passes(decode)
        assert read(prefill, "a", TEXT).error is None
        output = read(decode, "a", TEXT, **SAMPLED)
        expected = read_alone(TEXT, think=True, **SAMPLED_ALONE)
        assert (output.error, output.text) == (None, expected.text)
        assert len(expected.text or "") > 5
        assert passes.tokens[0] == [1]  # the first token of the text: bypassed
        assert difference(sent.of["a"], kv_of(expected)) < TOLERANCE
        stats = decode.stats()["kv_transfer"]
        prefix = len(decode.executor.worker.prefix_tokens(prompt("x", TEXT)))  # type: ignore[attr-defined]
        assert (stats["complete"], stats["tokens"]) == (1, prefix)
        assert prefill.stats()["kv_transfer"]["answered"] == 1
        assert prefill.stats()["free_blocks"] == decode.stats()["free_blocks"] == 256


@pytest.mark.parametrize("caching", [False, True])
def test_only_missing_tokens_are_computed(sockets: str, caching: bool) -> None:
    """The prefill stage read a prompt that begins alike; and one that does not."""
    with stages(sockets, enable_prefix_caching=caching) as (prefill, decode):
        sent, passes = SentKV(decode), Passes(decode)
        if caching:
            read(decode, "warm", "two foxes")  # its blocks must not be written again
        count = decode.executor.worker.prefix_tokens  # type: ignore[attr-defined]
        whole, shorter = (len(count(prompt("x", text))) for text in (TEXT + "!", TEXT))
        assert read(prefill, "a", TEXT).error is None
        passes.tokens.clear()
        output = read(decode, "b", TEXT + "!", **SAMPLED)
        expected = read_alone(TEXT + "!", think=True, **SAMPLED_ALONE)
        assert output.text == expected.text
        assert passes.tokens[0] == [whole - shorter + 1]  # the end marker of the text differs
        assert difference(sent.of["b"], kv_of(expected)) < TOLERANCE
        assert decode.stats()["kv_transfer"]["partial"] >= 1
        if caching:
            again = read_alone("two foxes", think=True, max_think_tokens=4)
            read(decode, "again", "two foxes")
            assert difference(sent.of["again"], kv_of(again)) < TOLERANCE


def test_what_no_producer_has_is_computed(sockets: str) -> None:
    with stages(sockets, think=False) as (_, decode):
        sent, passes = SentKV(decode), Passes(decode)
        assert read(decode, "a", TEXT).error is None
        assert difference(sent.of["a"], kv_of(read_alone(TEXT))) == 0
        assert len(passes.tokens) == 1
        assert decode.stats()["kv_transfer"]["missed"] == 1


def test_a_prefill_stage_that_is_gone_costs_no_request(sockets: str) -> None:
    with stages(sockets) as (prefill, decode):
        read(prefill, "a", TEXT)
        assert read(decode, "a", TEXT).error is None
        prefill.close()
        with pytest.warns(RuntimeWarning, match="is gone"):
            output = decode.submit(prompt("b", "the sea")).result(WAIT)
        assert decode.stats()["kv_transfer"]["failed"] == 1
        assert output.text == read_alone("the sea", think=True, max_think_tokens=4).text
        decode.fail_kv("b", "not needed")


def test_a_prefill_stage_that_never_comes_costs_no_request(sockets: str) -> None:
    _, take = ends(sockets, timeout=0.1)
    with ar_engine(sockets, kv_transfer=take, **HOW) as decode:
        for number in (1, 2):
            assert read(decode, str(number), TEXT).error is None
            assert decode.stats()["kv_transfer"]["failed"] == number


def test_stages_of_other_weights_are_an_error(sockets: str, tmp_path: Path) -> None:
    other = str(make_tiny_checkpoint(tmp_path / "other", seed=1))
    with stages(sockets, model=other) as (prefill, decode):
        read(prefill, "a", TEXT)
        output = decode.submit(prompt("a", TEXT)).result(WAIT)
        assert isinstance(output.error, SchemaError)
        assert "has K and V of" in str(output.error)


def test_an_image_and_what_follows_is_the_decode_stages(sockets: str) -> None:
    image = torch.arange(64 * 48 * 3).reshape(64, 48, 3).to(torch.uint8)
    text: Any = ["a photo of the sea", image, "at night"]
    with stages(sockets, think=False) as (prefill, decode):
        sent = SentKV(decode)
        assert read(prefill, "a", text).error is None
        assert read(prefill, "b", [image]).error is None  # nothing to read: no error
        assert read(decode, "a", text, seed=3).error is None
        assert difference(sent.of["a"], kv_of(read_alone(text, seed=3))) < TOLERANCE
        assert decode.stats()["kv_transfer"]["complete"] == 1


def test_weights_that_others_use_are_not_dropped(sockets: str) -> None:
    with stages(sockets) as (prefill, decode):
        for engine in (prefill, decode):
            with pytest.raises(EngineError, match="sleep level 2 with kv_transfer"):
                engine.sleep(2, timeout=WAIT)
        assert read(prefill, "a", TEXT).error is None
        assert prefill.sleep(1, timeout=WAIT)
        assert read(decode, "a", TEXT).error is None
        assert decode.stats()["kv_transfer"]["complete"] == 1


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"kv_role": "kv_both"}, "kv_role='kv_both': wanted 'kv_producer' or 'kv_consumer'"),
        ({"peers": ()}, r"peers=\(\): the URLs of stages"),
        ({"timeout": 0.0}, "timeout=0.0: wanted a number of seconds above 0"),
    ],
)
def test_a_wrong_kv_transfer(fields: dict[str, Any], word: str) -> None:
    how: dict[str, Any] = {"kv_role": "kv_producer", "url": "shm://a", "peers": ("shm://b",)}
    with pytest.raises(ValueError, match=word):
        KVTransferConfig(**{**how, **fields})


def test_what_a_stage_with_kv_transfer_may_not_have() -> None:
    give = KVTransferConfig("kv_producer", "shm://a", ("shm://b",))
    with pytest.raises(ValueError, match="one rank, not several"):
        OmniARConfig("x", kv_transfer=give, parallel_config=DiffusionParallelConfig(1, 1, 2))
    with pytest.raises(ValueError, match=r"leave kv\.sinks out"):
        OmniARConfig("x", kv_transfer=give, kv=KVConfig(sinks=("shm://c",)))
