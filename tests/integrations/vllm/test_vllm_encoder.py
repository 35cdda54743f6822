"""Encoder outputs between two engines' schedulers and workers, without their models."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

import torch

from omni_kvlink import KVLink, TensorTransferData
from omni_kvlink.integrations.vllm.encoder.loading import OUTPUT, THREADS
from omni_kvlink.integrations.vllm.identity import encoder_identity
from omni_kvlink.lowlevel import Manifest
from omni_kvlink.testing.rig import until
from support.link.ends import end_of
from support.vllm.encoder_steps import EMBEDS, SteppedEncoderEngine, encoded
from support.vllm.halves import link_of, loader_of, sender_of

if TYPE_CHECKING:
    from pathlib import Path

# Reaches into _ended, _loaded, _loads, _named, _reads, _sending, _sends: what a half keeps of
# requests that have ended costs memory, and shows nowhere.
# Reaches into _pools: all threads of a peer are taken, so that no connection is begun.

Open = Callable[..., SteppedEncoderEngine]

TTL = 3600
"""What expired would be freed after an hour."""


@pytest.fixture
def engine(vlm: Path, sockets: str) -> Iterator[Open]:
    """`engine(role, …)`: the producer `shm://e`, or one that reads from it."""
    opened = []

    def engine(role: str, cache: int = 512, **extra: Any) -> SteppedEncoderEngine:
        directory, given = {"directory": sockets}, dict(extra)
        if role != "consumer":
            given = {"url": "shm://e", "serve": directory, "ttl": TTL, **given}
        if role != "producer":
            given = {"peers": ["shm://e"], "connect": directory, "timeout": 60, **given}
        made = SteppedEncoderEngine(str(vlm), role, given, cache=cache)
        opened.append(made)
        return made

    yield engine
    for made in reversed(opened):
        made.close()


def same(found: torch.Tensor, item: str, embeds: int = EMBEDS) -> bool:
    return torch.equal(found, encoded(item, embeds))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The connector's errors and warnings."""
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records if "omni_kvlink" in record.name]


def transfers(producer: SteppedEncoderEngine) -> dict[str, int]:
    counts: dict[str, int] = link_of(sender_of(producer.worker)).stats()["transfers"]
    return counts


def check_nothing_is_kept(producer: SteppedEncoderEngine, consumer: SteppedEncoderEngine) -> None:
    """No payload, and nothing about a request that has ended."""
    consumer.settle()
    until(lambda: producer.live == 0, "every payload is freed", timeout=60)
    loads, sends = consumer.plans._loads, producer.plans._sends
    kept = (loads._named, loads._reads, loads._loads, loads._ended)
    assert not any([*kept, sends._sending, consumer.plans._loaded])


@pytest.mark.parametrize("scheme", ["shm", "zmq+ipc"])
def test_outputs_are_loaded_and_not_encoded(engine: Open, sockets: str, scheme: str) -> None:
    url = "shm://e" if scheme == "shm" else f"{scheme}://{sockets}/e"
    producer = engine("producer", url=url)
    consumer = engine("consumer", peers=[url], load_failure_policy="fail")
    params = producer.encode("r", "cat", "dog")
    assert producer.encodes == ["cat", "dog"]
    assert params.keys() == {"cat", "dog"}
    consumer.add("r", ["cat", "dog"], params)
    assert consumer.run("r") == ["length"]
    assert consumer.encodes == []
    assert all(same(found, item) for item, found in consumer.inputs["r"].items())
    assert consumer.inputs["r"].keys() == {"cat", "dog"}
    check_nothing_is_kept(producer, consumer)


def test_the_request_waits_and_others_run(engine: Open, sockets: str) -> None:
    """A load that has not ended holds back its own request only."""
    consumer = engine("consumer")
    params = {"cat": {"url": "shm://e", "key": "late"}}
    consumer.add("waits", ["cat"], params)
    consumer.add("runs", ["dog"])
    assert consumer.run("runs") == ["length"]
    assert "waits" not in consumer.ended
    metadata = {"item": "cat", "identity": {**encoder_identity(consumer.config, ""), "adapter": ""}}
    with KVLink.serve("shm://e", directory=sockets) as link:
        link.put(TensorTransferData("late", {OUTPUT: encoded("cat")}, metadata))
        assert consumer.run("waits") == ["length"]
    assert consumer.encodes == ["dog"]


def test_an_output_from_the_encoder_cache_is_sent_again(engine: Open) -> None:
    """Each request sends under keys of its own; its item is not encoded again for that."""
    producer, consumer = engine("producer"), engine("consumer", cache=EMBEDS)
    first, second = producer.encode("first", "cat"), producer.encode("second", "cat")
    assert producer.encodes == ["cat"]
    assert first["cat"]["key"] != second["cat"]["key"]
    consumer.add("first", ["cat"], first)
    assert consumer.run("first") == ["length"]
    consumer.add("another", ["dog"])
    assert consumer.run("another") == ["length"]
    assert "cat" not in consumer.cache  # evicted
    consumer.add("second", ["cat"], second, text=4)
    assert consumer.run("second") == ["length"]
    assert consumer.encodes == ["dog"]
    check_nothing_is_kept(producer, consumer)


def test_a_request_of_several_steps_sends_each_item_once(engine: Open) -> None:
    both = engine("both", url="shm://b")
    both.add("r", ["cat", "dog"], {"readers": 1}, tokens=3)
    assert both.run("r") == ["length"]
    assert both.live == 2


def test_two_requests_with_one_item(engine: Open) -> None:
    """It is loaded once; the payload of the other request is freed unread."""
    producer, consumer = engine("producer"), engine("consumer")
    for name in ("first", "second"):
        params = producer.encode(name, "cat")
        consumer.add(name, ["cat"], params, text=len(name))
    assert consumer.run("first", "second") == ["length"] * 2
    assert consumer.encodes == []
    assert all(same(consumer.inputs[name]["cat"], "cat") for name in ("first", "second"))
    check_nothing_is_kept(producer, consumer)


def test_two_consumers_of_one_output(engine: Open) -> None:
    producer = engine("producer")
    params = producer.encode("r", "cat", params={"readers": 2})
    for consumer in (engine("consumer"), engine("consumer")):
        assert producer.live == 1
        consumer.add("r", ["cat"], params)
        assert consumer.run("r") == ["length"]
        assert consumer.encodes == []
    check_nothing_is_kept(producer, consumer)


def test_one_engine_with_both_roles(engine: Open) -> None:
    """It sends what it loaded on, and what it encoded, if the request says so."""
    producer = engine("producer")
    both = engine("both", url="shm://b", peers=["shm://e", "shm://b"])
    both.add("r", ["cat", "dog"], {**producer.encode("r", "cat"), "readers": 1})
    assert both.run("r") == ["length"]
    assert both.encodes == ["dog"]
    consumer = engine("consumer", peers=["shm://b"], load_failure_policy="fail")
    consumer.add("r", ["cat", "dog"], both.ended["r"][1])
    assert consumer.run("r") == ["length"]
    assert all(same(found, item) for item, found in consumer.inputs["r"].items())
    check_nothing_is_kept(both, consumer)
    both.add("quiet", ["bird"])
    assert both.run("quiet") == ["length"]
    assert both.ended["quiet"][1] is None
    assert both.live == 0


def test_an_item_that_the_prefix_cache_covers(engine: Open) -> None:
    """It is neither loaded nor encoded, and its payload is freed."""
    given = {"load_failure_policy": "fail", "timeout": 20}
    producer, consumer = engine("producer"), engine("consumer", cache=EMBEDS, **given)
    consumer.add("before", ["cat"], text=2 * 32)
    assert consumer.run("before") == ["length"]
    consumer.add("another", ["dog"])
    assert consumer.run("another") == ["length"]
    assert "cat" not in consumer.cache
    params = producer.encode("r", "cat")
    consumer.add("r", ["cat"], params, text=2 * 32)
    assert consumer.run("r") == ["length"]
    assert "cat" not in consumer.inputs.get("r", {})
    consumer.add("never", ["cat"], {"cat": {"key": "never"}}, text=2 * 32)
    assert consumer.run("never") == ["length"]
    check_nothing_is_kept(producer, consumer)


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model": "another"},
    "item": {"item": "dog"},
    "rows": {"embeds": EMBEDS + 1},
}


@pytest.mark.parametrize("policy", ["encode", "fail"])
@pytest.mark.parametrize("other", OTHERS)
def test_another_output_is_refused(
    engine: Open, other: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By name; the request is encoded here, or ends with an error, as the policy says."""
    change = OTHERS[other]
    producer = engine("producer", model=change.get("model", "this"))
    consumer = engine("consumer", model="this", load_failure_policy=policy)
    item = change.get("item", "cat")
    params = producer.encode("r", item, embeds=change.get("embeds", EMBEDS))
    consumer.add("r", ["cat"], {"cat": params[item]})
    assert consumer.run("r") == ["length" if policy == "encode" else "error"]
    assert consumer.encodes == (["cat"] if policy == "encode" else [])
    text = "\n".join(lines(caplog))
    expected = {
        "model": "the encoder of shm://e is not this engine's: model is 'another' there and 'this'",
        "item": "shm://e sent the encoder output of item 'dog'; expected that of 'cat'",
        "rows": f"for {EMBEDS} embeddings",
    }
    assert expected[other] in text
    check_nothing_is_kept(producer, consumer)


def test_each_field_of_the_identity_counts(
    engine: Open, sockets: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever differs, alone, is refused by its name."""
    consumer = engine("consumer", load_failure_policy="fail")
    mine = {**encoder_identity(consumer.config, ""), "adapter": ""}
    assert all(isinstance(value, str) for value in mine.values())
    with KVLink.serve("shm://e", directory=sockets) as link:
        for name in mine:
            metadata = {"item": "cat", "identity": {**mine, name: "another"}}
            link.put(TensorTransferData(name, {OUTPUT: encoded("cat")}, metadata))
            consumer.add(name, ["cat"], {"cat": {"key": name}})
            assert consumer.run(name) == ["error"]
            assert f"{name} is 'another' there" in lines(caplog)[-2]


WRONG = {
    "an object": ["cat"],
    "url is 7, not a string": {"cat": {"url": 7, "key": "k"}},
    "key is '', not a string": {"cat": {"key": ""}},
    "key is {}, not a string": {"cat": {"key": {}}},
    "readers is True, not an integer from 1": {"cat": {"key": "k", "readers": True}},
    "readers is 0, not an integer from 1": {"cat": {"key": "k", "readers": 0}},
    "'shm://x', which is not one of this engine's peers: shm://e": {
        "cat": {"key": "k", "url": "shm://x"}
    },
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_params_are_the_error_of_their_request(
    engine: Open, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = engine("consumer", load_failure_policy="fail")
    consumer.add("wrong", ["cat"], WRONG[text])
    consumer.add("sound", ["dog"])
    assert consumer.run("wrong", "sound") == ["error", "length"]
    assert any(text in line and "'wrong'" in line for line in lines(caplog)), lines(caplog)


def test_wrong_params_of_a_producer(engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    producer = engine("producer")
    producer.add("wrong", ["cat"], {"readers": -1})
    assert producer.run("wrong") == ["stop"]
    assert producer.ended["wrong"][1] is None
    assert producer.live == 0
    assert any("readers is -1" in line for line in lines(caplog))


def test_items_that_the_request_does_not_have(
    engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines that identify media differently are noticed: else all would be encoded twice."""
    producer, consumer = engine("producer"), engine("consumer")
    consumer.add("r", ["dog"], producer.encode("r", "cat"))
    assert consumer.run("r") == ["length"]
    assert consumer.encodes == ["dog"]
    assert any("names encoder outputs of ['cat']" in line for line in lines(caplog))


@pytest.mark.parametrize("policy", ["encode", "fail"])
def test_a_request_without_the_media_ends_with_an_error(engine: Open, policy: str) -> None:
    """Nothing can be encoded here: not a step may run without the output."""
    producer, consumer = engine("producer"), engine("consumer", load_failure_policy=policy)
    params = producer.encode("r", "cat")
    consumer.add("sound", ["cat"], params, has_media=False)
    assert consumer.run("sound") == ["length"]
    assert same(consumer.inputs["sound"]["cat"], "cat")
    link_of(sender_of(producer.worker)).fail("failed", "no reason")
    consumer.add("failed", ["dog"], {"dog": {"key": "failed"}}, has_media=False)
    consumer.add("unnamed", ["bird"], has_media=False)
    assert consumer.run("failed", "unnamed") == ["error"] * 2
    check_nothing_is_kept(producer, consumer)


def test_a_preempted_request_without_the_media(engine: Open) -> None:
    """What this engine cannot encode again stays here until the request has ended."""
    producer, consumer = engine("producer"), engine("consumer", cache=EMBEDS)
    params = producer.encode("r", "cat")
    consumer.add("r", ["cat"], params, has_media=False, tokens=4)
    consumer.step_until(lambda: "r" in consumer.inputs)
    consumer.scheduler.reset_prefix_cache(reset_running_requests=True)
    del consumer.inputs["r"], consumer.cache["cat"]
    consumer.scheduler.encoder_cache_manager.reset()  # as if others had evicted it
    assert consumer.run("r") == ["length"]
    assert same(consumer.inputs["r"]["cat"], "cat")
    assert consumer.encodes == []
    check_nothing_is_kept(producer, consumer)


def test_a_full_link(engine: Open, sockets: str, caplog: pytest.LogCaptureFixture) -> None:
    """The producer's engine goes on; the consumer learns the reason at once."""
    producer = engine("producer", serve={"directory": sockets, "quota": 1})
    consumer = engine("consumer")
    params = producer.encode("r", "cat")
    consumer.add("r", ["cat"], params)
    assert consumer.run("r") == ["length"]
    assert consumer.encodes == ["cat"]
    assert any("CapacityError" in line and "not loaded" in line for line in lines(caplog))
    check_nothing_is_kept(producer, consumer)


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_flipped_bit(
    engine: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_packed: bool,
    sockets: str,
) -> None:
    """Of an output inside its offer or in the link's memory, after its digest was taken."""
    options = {} if is_packed else {"inline": 0}
    producer = engine("producer", serve={"directory": sockets, **options})
    consumer = engine("consumer")
    end = end_of(link_of(sender_of(producer.worker)))
    publish = end.publish

    def flip(leases: Any, **named: Any) -> Any:
        transfer = leases[0].tag
        payload = bytearray(transfer.inline)
        view = memoryview(payload) if is_packed else leases[0].region.view()
        plan = Manifest.decode(view, view.nbytes)
        view[plan.header_nbytes + plan.tensors[0].start + 100] ^= 1
        transfer.inline = bytes(payload)
        return publish(leases, **named)

    monkeypatch.setattr(end, "publish", flip)
    consumer.add("r", ["cat"], producer.encode("r", "cat"))
    assert consumer.run("r") == ["length"]
    assert consumer.encodes == ["cat"]
    assert same(consumer.inputs["r"]["cat"], "cat")
    assert any("IntegrityError" in line for line in lines(caplog))
    check_nothing_is_kept(producer, consumer)


@pytest.mark.parametrize("end", ["expires", "aborts", "closes"])
def test_an_output_that_is_gone(engine: Open, sockets: str, end: str) -> None:
    producer = engine("producer", ttl=0.05 if end == "expires" else 60)
    consumer = engine("consumer")
    params = producer.encode("r", "cat")
    if end == "expires":
        until(lambda: producer.live == 0, "it expires", timeout=60)
    elif end == "aborts":
        link_of(sender_of(producer.worker)).abort(params["cat"]["key"])
    else:
        producer.close()
        loader_of(consumer.plans).timeout = 0.1  # it may come back until then
    consumer.add("r", ["cat"], params)
    assert consumer.run("r") == ["length"]
    assert "cat" in consumer.encodes


def test_outputs_that_do_not_come_hold_up_no_other(engine: Open) -> None:
    """More of them than there are threads; when their requests end, nothing waits for them."""
    producer, consumer = engine("producer"), engine("consumer")
    stale = [f"stale {number}" for number in range(6)]
    for name in stale:
        consumer.add(name, [name], {name: {"key": name}})
    consumer.step_until(lambda: transfers(producer)["waiting"] == len(stale))
    consumer.add("sound", ["cat"], producer.encode("r", "cat"))
    assert consumer.run("sound") == ["length"]
    assert consumer.encodes == []
    for name in stale:
        consumer.abort(name)
    until(lambda: transfers(producer)["waiting"] == 0, "the requests are withdrawn", timeout=60)
    check_nothing_is_kept(producer, consumer)


def test_an_output_that_does_not_come_in_time(
    engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = engine("producer"), engine("consumer", timeout=0.2)
    consumer.add("r", ["cat"], {"cat": {"key": "never"}})
    assert consumer.run("r") == ["length"]
    assert consumer.encodes == ["cat"]
    assert any("TransferTimeout" in line for line in lines(caplog))
    check_nothing_is_kept(producer, consumer)


def test_an_output_whose_connection_is_not_begun_in_time(
    engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Its deadline does not wait for a thread to connect it."""
    producer, consumer = engine("producer"), engine("consumer", timeout=0.05)
    params, end = producer.encode("r", "cat"), threading.Event()
    for _ in range(THREADS):
        loader_of(consumer.plans)._pools["shm://e"].submit(end.wait)
    try:
        consumer.add("r", ["cat"], params)
        assert consumer.run("r") == ["length"]
        assert consumer.encodes == ["cat"]
        assert any("shm://e was not reached within 0.05 s" in line for line in lines(caplog))
    finally:
        end.set()
    link_of(sender_of(producer.worker)).abort(params["cat"]["key"])  # nobody has read it
    check_nothing_is_kept(producer, consumer)


def test_a_deadline_that_has_passed_hides_no_error(
    engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong source is what the log names, however late it is looked at."""
    consumer = engine("consumer", timeout=1e-9)
    consumer.add("r", ["cat"], {"cat": {"key": "k", "url": "shm://x"}})
    assert consumer.run("r") == ["length"]
    assert any(
        "'shm://x', which is not one of this engine's peers" in line for line in lines(caplog)
    )


@pytest.mark.parametrize("steps", [0, 1])
def test_an_aborted_request_of_a_consumer(engine: Open, steps: int) -> None:
    """Before its first step, and while its output is loaded."""
    producer, consumer = engine("producer"), engine("consumer")
    consumer.add("r", ["cat"], producer.encode("r", "cat"))
    for _ in range(steps):
        consumer.step()
    consumer.abort("r")
    check_nothing_is_kept(producer, consumer)


@pytest.mark.parametrize("steps", [0, 1])
def test_an_output_of_several_readers_that_one_does_not_need(engine: Open, steps: int) -> None:
    """It is kept for the others, and no longer than for them."""
    producer, consumer, other = engine("producer"), engine("consumer"), engine("consumer")
    params = producer.encode("r", "cat", params={"readers": 3})
    for name in ("first", "second"):
        consumer.add(name, ["cat"], params)
    for _ in range(steps):
        consumer.step()
    consumer.abort("first")
    assert consumer.run("second") == ["length"]
    assert producer.live == 1
    other.add("r", ["cat"], params)
    assert other.run("r") == ["length"]
    check_nothing_is_kept(producer, consumer)


@pytest.mark.parametrize("is_first", [True, False])
def test_one_of_two_requests_that_share_an_output_is_aborted(engine: Open, is_first: bool) -> None:
    """As with `n` > 1: the other one loads it."""
    producer, consumer = engine("producer"), engine("consumer", load_failure_policy="fail")
    params = producer.encode("r", "cat")
    consumer.add("first", ["cat"], params)
    consumer.add("second", ["cat"], params)
    consumer.step()
    consumer.abort("first" if is_first else "second")
    assert consumer.run("second" if is_first else "first") == ["length"]
    assert consumer.encodes == []
    check_nothing_is_kept(producer, consumer)


def test_a_failed_output_that_two_requests_share(engine: Open) -> None:
    """Each of them ends; one that names another source of the item does not."""
    producer, consumer = engine("producer"), engine("consumer", load_failure_policy="fail")
    link_of(sender_of(producer.worker)).fail("k", "no reason")
    for name in ("first", "second"):
        consumer.add(name, ["cat"], {"cat": {"key": "k"}})
    consumer.add("third", ["cat"], producer.encode("r", "cat"))
    assert consumer.run("first", "second", "third") == ["error", "error", "length"]
    check_nothing_is_kept(producer, consumer)


def test_an_aborted_request_of_a_producer(engine: Open) -> None:
    """Nobody learns the keys of its outputs: the next step frees them."""
    producer = engine("producer")
    producer.add("r", ["cat", "dog"], embeds=300)  # one in each step
    producer.step()
    assert producer.live == 1
    producer.abort("r")
    producer.encode("next", "bird", params={"readers": 0})
    assert producer.live == 0


def test_an_aborted_request_of_an_engine_with_both_roles(engine: Open) -> None:
    """Its keys wait for a step that computes something: vLLM passes no other to the worker."""
    both = engine("both", url="shm://b")
    both.add("r", ["cat", "dog"], {"readers": 1}, embeds=300)
    both.step()
    assert both.live == 1
    both.abort("r")
    both.settle()
    both.add("next", ["bird"])
    assert both.run("next") == ["length"]
    assert both.live == 0


def test_an_item_that_the_producer_could_not_encode(
    engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """It came without the media: the consumer learns it at once."""
    producer, consumer = engine("producer"), engine("consumer", load_failure_policy="fail")
    params = producer.encode("r", "cat", has_media=False)
    consumer.add("r", ["cat"], params)
    assert consumer.run("r") == ["error"]
    assert any("its step ended without it" in line for line in lines(caplog))
    check_nothing_is_kept(producer, consumer)


def test_settings_are_checked(engine: Open) -> None:
    with pytest.raises(ValueError, match=r"colour: no such setting; there are .*ttl"):
        engine("producer", colour="red")
    with pytest.raises(ValueError, match="url is missing"):
        engine("producer", url="")
    with pytest.raises(ValueError, match=r"peers='shm://e': wanted a list"):
        engine("consumer", peers="shm://e")
    with pytest.raises(ValueError, match=r"shm://e-\* names no producer"):
        engine("consumer", peers=["shm://e", "shm://e-*"])
    with pytest.raises(
        ValueError, match="load_failure_policy='recompute': wanted 'encode' or 'fail'"
    ):
        engine("consumer", load_failure_policy="recompute")
    with pytest.raises(ValueError, match="ttl=0: wanted a number of seconds above 0"):
        engine("producer", ttl=0)


def test_a_model_for_text_is_refused(model: Path) -> None:
    with pytest.raises(ImportError, match="is for text alone"):
        SteppedEncoderEngine(str(model), "consumer", {"peers": ["shm://e"]})
