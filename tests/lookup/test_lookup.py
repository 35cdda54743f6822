"""Lookups over links: right bytes, waiting, several of each side, deaths and refusals."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    CapacityError,
    ClosedError,
    IntegrityError,
    KVConsumer,
    KVLink,
    KVProducer,
    PeerLostError,
    SchemaError,
    TensorTransferData,
    TransferFailed,
    TransferTimeout,
    UnavailableError,
    VersionError,
)
from omni_kvlink.connectors.registry import backend, split_url
from omni_kvlink.lookup import LookupConsumer, LookupProducer, PrefixStore
from omni_kvlink.lookup import consumer as lookup_consumer
from omni_kvlink.lookup.messages import (
    HELLO,
    VERSION,
    Found,
    LookupHello,
    Question,
    message_payload,
    read_message,
    read_prompt,
)
from omni_kvlink.lookup.tokens import encode
from omni_kvlink.testing.rig import until
from support import FOLDER
from support.faults.leak_checks import zmq_started as zmq_started
from support.link.ends import session_of
from support.lookup.killed_producer import TOKENS
from support.lookup.prompts import ROW, assert_right, insert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.lookup import Match

# Reaches into _stores, _last_question, _retry_at, _sending: no public name says what a lookup has
# asked of one producer, nor when it tries a lost one again.
pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
_numbers = itertools.count()
LONG = 1500
"""Tokens of a prompt of which 1 MiB holds three."""
BIG = range(40000)
"""A prompt of which each layer's K and V are more than one MiB: two digests."""
URLS = [
    "inproc://{name}",
    "shm://{name}",
    "zmq+ipc://{root}/{name}",
    "ucx://127.0.0.1:0?trusted_network=1",
]


def hello(model: str) -> LookupHello:
    return LookupHello("x", model, VERSION)


class LookupStages:
    """Producers with a store each, and consumers of them all, in this process."""

    def __init__(self, url: str, root: str):
        self._url, self._root = url, root
        self.ends = contextlib.ExitStack()
        self.stores: list[PrefixStore] = []
        self.producers: list[LookupProducer] = []
        self.links: list[KVProducer] = []
        self.consumers: list[KVConsumer] = []

    def serve(self, quota: int = 16 << 20) -> KVProducer:
        name = f"l{next(_numbers)}"
        url = self._url.format(name=name, root=self._root)
        return KVLink.serve(url, directory=self._root, quota=quota)

    def connect(self, link: KVProducer) -> KVConsumer:
        return KVLink.connect(link.url, timeout=60, directory=self._root)

    def start(self, producers: int = 1, quota: int = 16 << 20, model: str = "m") -> LookupConsumer:
        self.questions = self.serve()
        for _ in range(producers):
            self.links.append(self.serve(quota))
            self.stores.append(PrefixStore(self.links[-1]))
            own = self.stores[-1], [self.connect(self.questions)]
            self.producers.append(self.ends.enter_context(LookupProducer(*own, model=model)))
        self.consumers = [self.connect(link) for link in self.links]
        lookup = LookupConsumer(self.questions, self.consumers, model="m", verify="full")
        return self.ends.enter_context(lookup)

    def inbox(self) -> str:
        """The key by which the first producer receives questions, as its hello says."""
        with self.consumers[0].get(HELLO, timeout=60) as data:
            return read_message(data, LookupHello).inbox

    @property
    def is_mapped(self) -> bool:
        return self._url.startswith(("shm:", "inproc:"))

    def settle(self) -> None:
        """Every answer was given back, once; what stays is the greeting and what is kept."""
        for link, store in zip(self.links, self.stores, strict=True):
            until(partial(is_settled, link), "every answer was given back")
            transfers = link.stats()["transfers"]
            assert transfers["kept"] == store.stats()["prompts"]
            ended = sum(transfers[name] for name in ("released", "expired", "evicted", "withdrawn"))
            assert transfers["committed"] - 1 == transfers["kept"] + ended
            assert transfers["failed"] == 0


def is_settled(link: KVProducer) -> bool:
    transfers = link.stats()["transfers"]
    return transfers["live"] == 1 + transfers["kept"] and not transfers["leased"]


@pytest.fixture(params=URLS, ids=lambda url: split_url(url)[0])
def bed(request: pytest.FixtureRequest, sockets: str) -> Iterator[LookupStages]:
    try:
        backend(split_url(request.param)[0])
    except UnavailableError as error:
        pytest.skip(str(error))
    bed = LookupStages(request.param, sockets)
    with bed.ends:
        yield bed


@pytest.fixture
def shm(sockets: str) -> Iterator[LookupStages]:
    bed = LookupStages("shm://{name}", sockets)
    with bed.ends:
        yield bed


@pytest.fixture
def zmq(sockets: str) -> Iterator[LookupStages]:
    bed = LookupStages("zmq+ipc://{root}/{name}", sockets)
    with bed.ends:
        yield bed


def once_asked(producers: list[LookupProducer], call: Callable[[], None]) -> threading.Thread:
    """Call this when each of these producers keeps a question that it cannot answer yet."""

    def run() -> None:
        # An open question has no effect that shows until it is answered, and no counter.
        until(lambda: all(producer._waiting for producer in producers), "questions wait")
        call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_complete_partial_and_missed(bed: LookupStages) -> None:
    lookup = bed.start()
    with lookup.select(TOKENS, timeout=60) as match:
        assert (match.tokens, match.data) == (0, None)
    insert(bed.stores[0], TOKENS, states=1)
    for prompt, found in ((TOKENS, 50), (TOKENS[:20], 19), ([*TOKENS[:30], 7, 7], 30), ([9], 0)):
        with lookup.select(prompt, timeout=60) as match:
            assert match.tokens == found
            assert_right(match, prompt)
    bed.settle()


def test_only_what_matches_is_moved(bed: LookupStages) -> None:
    """Where bytes are fetched, a part of an entry is a payload of its own; all of it is not."""
    lookup = bed.start()
    insert(bed.stores[0], range(5000), states=1)
    with lookup.select([*range(10), 0, 0], timeout=60) as match:
        assert match.tokens == 10
        assert_right(match, [*range(10), 0, 0])
    moved = 0 if bed.is_mapped else 10 * ROW
    assert bed.producers[0].stats()["nbytes"] == moved
    with lookup.select(range(5000), timeout=60) as match:
        assert_right(match, range(5000))
    assert bed.producers[0].stats()["nbytes"] == moved
    bed.settle()


def dense_key(match: Match) -> torch.Tensor:
    """K of the first layer, as a view."""
    view = match.keys[0]
    assert isinstance(view, torch.Tensor)
    return view


@pytest.mark.parametrize("bed", URLS[:2], indirect=True)
def test_a_match_copies_nothing(bed: LookupStages) -> None:
    """Two consumers read the producer's own memory, of which no answer takes any."""
    first = bed.start()
    questions, answers = bed.serve(), bed.connect(bed.links[0])
    bed.producers[0].listen(bed.connect(questions))
    second = bed.ends.enter_context(LookupConsumer(questions, [answers], model="m"))
    insert(bed.stores[0], range(5000), states=1)
    link, prompt = bed.links[0], [*range(3000), 7, 7]
    used = link.stats()["memory"]["used"]
    with first.select(prompt, timeout=60) as one, second.select(prompt, timeout=60) as other:
        assert one.tokens == other.tokens == 3000
        assert_right(one, prompt)
        until(lambda: link.stats()["transfers"]["live"] == 2, "the answers were read")
        assert link.stats()["memory"]["used"] == used
        with bed.stores[0].select(range(5000)) as own:
            dense_key(own)[8] = 77.0  # in the producer's memory
        assert (dense_key(one)[8] == 77.0).all()
        assert torch.equal(dense_key(one), dense_key(other))
    bed.settle()


def test_a_match_that_is_dropped_takes_no_lock(shm: LookupStages) -> None:
    """The collector drops it in any thread, also in one that sends."""
    lookup = shm.start()
    insert(shm.stores[0], TOKENS)
    match = lookup.select(TOKENS, timeout=60)
    session = session_of(shm.consumers[0])
    assert match.data is not None
    # The locks themselves: what takes one of them while it is held here never returns.
    with session._channel._lock, pytest.warns(ResourceWarning):
        del match
    shm.settle()


def test_decode_first(bed: LookupStages) -> None:
    """The request arrives before the entry does; the insert wakes it."""
    lookup = bed.start(producers=2)
    insert(bed.stores[0], TOKENS[:5])
    timer = once_asked(bed.producers, lambda: insert(bed.stores[1], TOKENS, states=2))
    with lookup.select(TOKENS, wait=True, timeout=60) as match:
        assert match.is_complete
        assert_right(match, TOKENS)
    timer.join()


def test_what_is_no_argument_is_refused(bed: LookupStages) -> None:
    lookup = bed.start()
    for one in (lookup, bed.stores[0]):
        with pytest.raises(SchemaError, match="wait='false': wanted true or false"):
            one.select(TOKENS, wait="false", timeout=60)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="reason: a string, this is None"):
        bed.stores[0].fail(TOKENS, None)  # type: ignore[arg-type]


def test_a_failed_prefill_is_told_at_once(bed: LookupStages) -> None:
    lookup = bed.start()
    timer = once_asked(bed.producers, lambda: bed.stores[0].fail(TOKENS, "out of memory"))
    with pytest.raises(TransferFailed, match="out of memory"):
        lookup.select(TOKENS, wait=True, timeout=60)
    timer.join()


def test_waiting_in_vain_ends_in_time(bed: LookupStages) -> None:
    lookup = bed.start()
    with pytest.raises(TransferTimeout):
        lookup.select(TOKENS, wait=True, timeout=0.3)
    insert(bed.stores[0], TOKENS)  # too late: the answer is discarded
    with lookup.select(TOKENS, timeout=60) as match:
        assert_right(match, TOKENS)


def test_the_longest_of_several_stores_is_taken(bed: LookupStages) -> None:
    lookup = bed.start(producers=3)
    for store, tokens in zip(bed.stores, (10, 40, 20), strict=True):
        insert(store, TOKENS[:tokens])
    with lookup.select(TOKENS, timeout=60) as match:
        assert match.tokens == 40
        assert_right(match, TOKENS)
    bed.settle()
    assert [producer.stats()["answered"] for producer in bed.producers] == [1, 1, 1]
    hits = [link.stats()["transfers"]["missed"] for link in bed.links]
    assert hits == [0, 0, 0]


@pytest.mark.parametrize("producers", [1, 2])
def test_what_was_evicted_meanwhile_is_a_shorter_match(bed: LookupStages, producers: int) -> None:
    """Between the answer that names an entry and the get of it."""
    lookup = bed.start(producers=producers, quota=1 << 20)
    for store in bed.stores:
        insert(store, range(LONG))
    insert(bed.stores[0], range(LONG + 100), states=1)
    find, finds = bed.stores[0].find, list[Found]()

    def evicting(key: bytes) -> Found:
        finds.append(find(key))
        if len(finds) == 1:
            for first in (10000, 20000, 30000):
                insert(bed.stores[0], range(first, first + LONG))
            insert(bed.stores[0], [*range(5), 7, 7])
        return finds[-1]

    bed.stores[0].find = evicting  # type: ignore[method-assign]
    with lookup.select(range(LONG + 100), timeout=60) as match:
        assert match.tokens == (5 if producers == 1 else LONG)
        assert_right(match, range(LONG + 100))
    assert finds[0].tokens == LONG + 100
    assert bed.links[0].stats()["transfers"]["missed"] == 1
    bed.settle()


def test_what_was_evicted_before_it_was_copied(zmq: LookupStages) -> None:
    """Where a part of an entry is to be fetched, its producer finds it gone itself."""
    lookup = zmq.start(quota=1 << 20)
    insert(zmq.stores[0], range(LONG))
    find, finds = zmq.stores[0].find, list[Found]()

    def evicting(key: bytes) -> Found:
        finds.append(find(key))
        for first in (10000, 20000, 30000):
            insert(zmq.stores[0], range(first, first + LONG))
        return finds[0]

    zmq.stores[0].find = evicting  # type: ignore[method-assign]
    with lookup.select(range(20), timeout=60) as match:
        assert (match.tokens, match.data) == (0, None)
    assert finds[0].tokens == 19


def test_a_match_outlives_what_it_came_from(bed: LookupStages) -> None:
    """What a reader has is not evicted meanwhile."""
    lookup = bed.start(quota=1 << 20)
    insert(bed.stores[0], range(LONG))
    with lookup.select(range(LONG), timeout=60) as match:
        for first in range(10000, 19000, 1000):
            tokens = range(first, first + LONG // 2)
            insert(bed.stores[0], tokens)
            with lookup.select(tokens, timeout=60) as other:
                assert_right(other, tokens)
        assert_right(match, range(LONG))
    with lookup.select(range(LONG), timeout=60) as match:
        assert match.tokens == LONG - 1
        assert_right(match, range(LONG))


def test_consumers_and_threads_at_once(bed: LookupStages) -> None:
    first = bed.start(producers=2)
    questions = bed.serve()
    for producer in bed.producers:
        producer.listen(bed.connect(questions))
    links = [bed.connect(link) for link in bed.links]
    second = bed.ends.enter_context(LookupConsumer(questions, links, model="m"))
    errors: list[BaseException] = []

    def work(lookup: LookupConsumer, seed: int) -> None:
        try:
            for step in range(10):
                prompt = [*range(step % 7), *range(step + seed, step + seed + 30)]
                insert(bed.stores[step % 2], prompt, states=1)
                with lookup.select(prompt, timeout=60) as match:
                    assert_right(match, prompt)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(lookup, seed))
        for seed, lookup in enumerate((first, first, second, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    bed.settle()


def test_another_model_is_refused(shm: LookupStages) -> None:
    lookup = shm.start(model="other")
    insert(shm.stores[0], TOKENS)
    with pytest.raises(SchemaError, match="K and V of 'other'; wanted 'm'"):
        lookup.select(TOKENS, timeout=60)


def test_no_room_for_the_copy_is_told(zmq: LookupStages) -> None:
    lookup = zmq.start(quota=1 << 20)
    insert(zmq.stores[0], range(3 * LONG))
    with pytest.raises(TransferFailed, match=r"bytes"):
        lookup.select(range(2 * LONG), timeout=60)
    with lookup.select(range(3 * LONG), timeout=60) as match:  # no copy, no memory
        assert match.tokens == 3 * LONG - 1


def test_an_answer_that_is_not_fetched_expires(shm: LookupStages) -> None:
    lookup = shm.start()
    insert(shm.stores[0], TOKENS, states=1)
    answer = shm.producers[0]._answer  # delayed there, between the question and its answer

    def late(request: Any) -> None:
        time.sleep(0.2)
        answer(request)

    shm.producers[0]._answer = late  # type: ignore[method-assign]  # as above
    with pytest.raises(TransferTimeout):
        lookup.select(TOKENS, timeout=0.1)
    until(partial(is_settled, shm.links[0]), "it has expired")


def test_what_is_no_question_is_ignored(shm: LookupStages) -> None:
    lookup = shm.start()
    insert(shm.stores[0], TOKENS)
    shm.questions.put(message_payload(shm.inbox(), LookupHello("x", "y"))).wait(timeout=60)
    with lookup.select(TOKENS, timeout=60) as match:
        assert_right(match, TOKENS)
    assert shm.producers[0].stats()["ignored"] == 1


def test_a_producer_listens_on_after_a_failed_question(shm: LookupStages) -> None:
    """The reason of the failure is remembered for minutes, and a `get` raises it at once."""
    lookup = shm.start()
    insert(shm.stores[0], TOKENS)
    shm.questions.fail(shm.inbox(), "no question")
    until(lambda: shm.producers[0].stats()["ignored"] > 0, "its listener saw the failure")
    with lookup.select(TOKENS, timeout=60) as match:
        assert_right(match, TOKENS)
    with lookup.select(TOKENS, timeout=60) as match:
        assert_right(match, TOKENS)


def test_a_question_that_failed_fails_no_other(shm: LookupStages) -> None:
    lookup = shm.start()
    insert(shm.stores[0], TOKENS)
    lookup.select(TOKENS, timeout=60).release()
    store = lookup._stores[0]
    assert store._last_question is not None
    store._last_question.wait(timeout=60)
    store._last_question = shm.questions.put(message_payload("other", LookupHello("x", "y")))
    shm.questions.fail("other", "rejected")
    with lookup.select(TOKENS, timeout=60) as match:
        assert_right(match, TOKENS)


def test_each_select_has_its_own_deadline(shm: LookupStages) -> None:
    """While another thread waits until the producer has read its question."""
    link, questions = shm.serve(), shm.serve()
    with link, LookupConsumer(questions, [shm.connect(link)], model="m") as lookup:
        link.put(message_payload(HELLO, hello("m")), readers=3)  # nobody listens

        def select() -> None:
            with pytest.raises(ClosedError):
                lookup.select(TOKENS, timeout=3600)

        threads = [threading.Thread(target=select) for _ in range(2)]
        for thread in threads:
            thread.start()
        sending = lookup._stores[0]._sending

        def is_sending() -> bool:
            is_free = sending.acquire(blocking=False)
            if is_free:
                sending.release()
            return not is_free and lookup._stores[0]._last_question is not None

        until(is_sending, "one waits until the question of the other was read")
        with pytest.raises(TransferTimeout, match="question of another thread"):
            lookup.select(TOKENS, timeout=0.1)
        questions.close()
        lookup.close()
        for thread in threads:
            thread.join()


def test_a_question_waits_for_memory_as_long_as_its_select(shm: LookupStages) -> None:
    lookup = shm.start()
    memory = TensorTransferData("m", {"m": torch.empty(16_600_000, dtype=torch.uint8)})
    allocation = shm.questions.allocate(memory)
    with pytest.raises(CapacityError, match=r"after [012]\.\d+ s"):
        lookup.select(range(60000), timeout=3.0)
    allocation.release()


def test_what_is_no_greeting_is_refused(shm: LookupStages) -> None:
    link, questions = shm.serve(), shm.serve()
    with link, LookupConsumer(questions, [shm.connect(link)], model="m") as lookup:
        link.put(message_payload(HELLO, hello("m")), readers=2)
        while not questions.stats()["transfers"]["committed"]:
            with pytest.raises(TransferTimeout):  # nobody listens there
                lookup.select(TOKENS, timeout=0.3)
        with pytest.raises(TransferTimeout, match="still committed"):
            lookup.select(TOKENS, timeout=0.3)


def test_close_wakes_who_waits(bed: LookupStages) -> None:
    lookup = bed.start()
    timer = once_asked(bed.producers, lookup.close)
    with pytest.raises(ClosedError):
        lookup.select(TOKENS, wait=True, timeout=60)
    timer.join()
    with pytest.raises(ClosedError):
        lookup.select(TOKENS, timeout=60)
    bed.producers[0].close()
    with pytest.raises(ClosedError):
        bed.producers[0].listen(bed.consumers[0])


# Namespaces


def select_as(lookup: LookupConsumer, namespace: str, prompt: list[int]) -> tuple[int, object]:
    """The number of tokens found, and the namespace that they were inserted with."""
    with lookup.select(prompt, namespace=namespace, timeout=60) as match:
        assert_right(match, prompt)
        return match.tokens, match.data and match.data.metadata.extra["namespace"]


def insert_as(store: PrefixStore, namespace: str, prompt: list[int]) -> None:
    insert(store, prompt, states=1, namespace=namespace, extra={"namespace": namespace})


def test_prompts_of_one_namespace_match(bed: LookupStages) -> None:
    lookup = bed.start()
    for name in ("a", "b", ""):
        assert select_as(lookup, name, TOKENS) == (0, None)
        insert_as(bed.stores[0], name, TOKENS)
        for prompt, found in ((TOKENS, 50), (TOKENS[:20], 19), ([*TOKENS[:30], 7], 30)):
            assert select_as(lookup, name, prompt) == (found, name)
    assert select_as(lookup, "c", TOKENS[:20]) == (0, None)
    bed.settle()


def test_producers_of_several_namespaces(bed: LookupStages) -> None:
    """The longest match of the namespace is taken, not one that is longer in another."""
    lookup = bed.start(producers=3)
    for number, name, tokens in ((0, "a", 50), (1, "b", 40), (2, "a", 30), (2, "", 20)):
        insert_as(bed.stores[number], name, TOKENS[:tokens])
    assert select_as(lookup, "a", TOKENS) == (50, "a")
    assert select_as(lookup, "b", TOKENS) == (40, "b")
    assert select_as(lookup, "", TOKENS) == (20, "")
    assert select_as(lookup, "c", TOKENS) == (0, None)
    bed.settle()
    assert [producer.stats()["answered"] for producer in bed.producers] == [4, 4, 4]


def test_decode_first_waits_for_its_namespace(bed: LookupStages) -> None:
    lookup = bed.start(producers=2)

    def insert_others_first() -> None:
        for store, name in itertools.product(bed.stores, ("", "b")):
            insert_as(store, name, TOKENS)
        insert_as(bed.stores[1], "a", TOKENS)

    timer = once_asked(bed.producers, insert_others_first)
    with lookup.select(TOKENS, namespace="a", wait=True, timeout=60) as match:
        assert match.is_complete
        assert match.data
        assert match.data.metadata.extra == {"namespace": "a"}
    timer.join()


def test_a_mapping_is_a_namespace(bed: LookupStages) -> None:
    lookup = bed.start()
    insert(bed.stores[0], TOKENS, namespace={"adapter": "l", "salt": "s"})
    for namespace, found in (({"salt": "s", "adapter": "l"}, 49), ({"adapter": "l"}, 0)):
        with lookup.select(TOKENS, namespace=namespace, timeout=60) as match:
            assert match.tokens == found


def test_a_select_in_what_is_no_namespace_sends_nothing(shm: LookupStages) -> None:
    lookup = shm.start()
    with pytest.raises(SchemaError, match="namespace: int; wanted"):
        lookup.select(TOKENS, namespace=3, timeout=60)  # type: ignore[arg-type]
    assert not shm.questions.stats()["transfers"]["committed"]


def test_a_producer_of_another_version_is_refused(shm: LookupStages) -> None:
    link, questions = shm.serve(), shm.serve()
    with link, LookupConsumer(questions, [shm.connect(link)], model="m") as lookup:
        link.put(TensorTransferData(HELLO, {}, {"inbox": "x", "model": "m", "namespaces": True}))
        with pytest.raises(VersionError, match=f"{link.url}: lookups of version 1, here .* 2"):
            lookup.select(TOKENS, timeout=60)
        assert not questions.stats()["transfers"]["committed"]


def test_a_question_of_another_version_is_refused(shm: LookupStages) -> None:
    """Its select raises at once, and says why."""
    shm.start()
    insert(shm.stores[0], TOKENS)
    tokens = {"tokens": torch.tensor([0, 0, 0, 1], dtype=torch.uint8)}
    question = {"answer": "k", "timeout": 60.0, "wait": False, "probe": False}
    shm.questions.put(TensorTransferData(shm.inbox(), tokens, question))
    with pytest.raises(TransferFailed, match="lookups of version 1, here they are 2"):
        shm.consumers[0].get("k", timeout=60)


@pytest.mark.parametrize("name", ["", "a"])
def test_a_question_brings_the_namespace(name: str) -> None:
    prompt = encode(TOKENS, None, name)
    question = Question("k", 1.0, namespace=prompt[:32].hex() if name else "", version=VERSION)
    payload = message_payload("x", question, prompt)
    assert payload.tensors()[0].nbytes == 4 * len(TOKENS)
    assert read_prompt(payload, read_message(payload, Question)) == prompt


@pytest.mark.parametrize("name", ["0" * 63, "0" * 65, "0" * 64 + "\n", "g" * 64, "AB" * 32, "a"])
def test_a_question_with_a_wrong_namespace_is_refused(name: str) -> None:
    payload = message_payload("x", Question("k", 1.0, namespace=name), encode(TOKENS, None))
    with pytest.raises(SchemaError, match="namespace"):
        read_message(payload, Question)


# Other processes, which die


@contextlib.contextmanager
def lookup_process(
    side: str, mine: str, theirs: str, sockets: str
) -> Iterator[subprocess.Popen[str]]:
    script = str(FOLDER / "lookup" / "killed_producer.py")
    command = [sys.executable, script, side, mine, theirs, sockets]
    pipe, env = subprocess.PIPE, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdout
        assert process.stdout.readline() == "serving\n"
        try:
            yield process
        finally:
            process.kill()
            # A SIGKILL leaves the name. The FIFO beside it belongs to those who wait for it.
            for left in ("killed", "killed.sock", "killed.sock.lock"):
                (Path(sockets) / left).unlink(missing_ok=True)


def test_a_killed_producer_is_left_out(
    shm: LookupStages, sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_consumer, "RETRY_INTERVAL", 3600.0)
    lookup = shm.start()
    insert(shm.stores[0], TOKENS[:10])
    with lookup_process("producer", "shm://killed", shm.questions.url, sockets) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        lookup.add(KVLink.connect("shm://killed", timeout=60, directory=sockets))
        with lookup.select(TOKENS, timeout=60) as match:
            assert match.is_complete
            assert_right(match, TOKENS)
        prompt = [*TOKENS, 1, 2]

        def kill_then_insert() -> None:
            os.kill(process.pid, signal.SIGKILL)
            until(lambda: lookup._stores[1]._retry_at > 0, "its death was seen")
            insert(shm.stores[0], prompt)

        timer = once_asked(shm.producers, kill_then_insert)
        with (
            pytest.warns(RuntimeWarning, match="shm://killed is gone"),
            lookup.select(prompt, wait=True, timeout=60) as match,
        ):
            assert_right(match, prompt)
        timer.join()
    with lookup.select(TOKENS, timeout=60) as match:  # no warning: the dead is not asked again
        assert_right(match, TOKENS)
    with lookup_process("producer", "shm://killed", shm.questions.url, sockets) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        lookup._stores[1]._retry_at = 1e-9  # as if its pause were over
        with lookup.select(TOKENS, timeout=60) as match:  # another life, another inbox
            assert match.is_complete


def test_the_only_producer_is_killed_while_a_consumer_waits(
    shm: LookupStages, sockets: str
) -> None:
    questions = shm.serve()
    with lookup_process("producer", "shm://killed", questions.url, sockets) as process:
        link = KVLink.connect("shm://killed", timeout=60, directory=sockets)
        with LookupConsumer(questions, [link], model="m") as lookup:

            def kill_once_asked() -> None:
                until(lambda: questions.stats()["transfers"]["released"] == 1, "it was asked")
                os.kill(process.pid, signal.SIGKILL)

            timer = threading.Thread(target=kill_once_asked)
            timer.start()
            with pytest.warns(RuntimeWarning, match="gone"), pytest.raises(PeerLostError):
                lookup.select([7, 7], wait=True, timeout=60)
            timer.join()
            asked_again_at = lookup._stores[0]._retry_at
            for _ in range(3):  # a busy consumer asks more often than a dead producer is tried
                with pytest.raises(PeerLostError, match="was gone a moment ago"):
                    lookup.select([7, 7], timeout=60)
            assert lookup._stores[0]._retry_at == asked_again_at
            assert_freed(lambda: lookup.select([7, 7], timeout=60))


def assert_freed(call: Callable[[], object]) -> None:
    """No error refers to itself by its traceback: else all of that stays until a collection."""
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(PeerLostError):
            call()
        kept = [one for one in gc.get_objects() if isinstance(one, PeerLostError)]
        assert not [one for one in kept if one.__traceback__ is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("url", ["shm://{name}", "zmq+ipc://{root}/{name}"], ids=["shm", "zmq"])
def test_another_process_reads_what_is_kept(sockets: str, url: str) -> None:
    """Over shared memory it sees a byte that changes there; over ZMQ it has its own."""
    bed, mine = LookupStages(url, sockets), url.format(name="killed", root=sockets)
    with bed.ends:
        bed.start()
        insert(bed.stores[0], range(LONG), states=1)
        with lookup_process("reader", mine, bed.links[0].url, sockets) as process:
            bed.producers[0].listen(KVLink.connect(mine, timeout=60, directory=sockets))
            assert process.stdin
            assert process.stdout
            assert process.stdout.readline() == "40 True\n"
            with bed.stores[0].select(range(LONG)) as own:
                dense_key(own)[8] = 77.0
            process.stdin.write("again\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{bed.is_mapped}\n"
            assert bed.producers[0].stats()["nbytes"] == (0 if bed.is_mapped else 40 * ROW)


def test_a_wrong_byte_of_a_match_is_found(bed: LookupStages) -> None:
    """Of the tokens that match, and of no others; then it is computed again."""
    lookup = bed.start()
    insert(bed.stores[0], BIG, states=1)
    kept = bed.stores[0].find(encode(BIG, None)).entry
    with bed.stores[0].select(BIG) as own:
        dense_key(own)[-1] += 1.0
    with lookup.select(BIG[:40], timeout=60) as match:
        assert_right(match, BIG[:40])
    with pytest.raises((IntegrityError, TransferFailed), match="not those committed"):
        lookup.select(BIG, timeout=60)
    until(lambda: kept not in str(bed.stores[0].find(encode(BIG, None))), "it is not named again")
    with lookup.select(BIG, timeout=60) as match:
        assert match.tokens == 0


def test_a_wrong_byte_is_not_copied(zmq: LookupStages) -> None:
    """The copy would have digests of its own, of the wrong bytes."""
    lookup = zmq.start()
    insert(zmq.stores[0], BIG, states=1)
    with zmq.stores[0].select(BIG) as own:
        dense_key(own)[8] += 1.0
    with pytest.raises(TransferFailed, match="not those committed"):
        lookup.select(BIG[:40], timeout=60)
    with lookup.select(BIG[:40], timeout=60) as match:
        assert match.tokens == 0


def test_a_killed_consumer_gives_everything_back_and_may_return(
    shm: LookupStages, sockets: str
) -> None:
    shm.start()
    insert(shm.stores[0], TOKENS, states=1)
    producer, url = shm.producers[0], shm.links[0].url
    for run in range(2):
        with lookup_process("consumer", "shm://killed", url, sockets) as process:
            if not run:
                producer.listen(KVLink.connect("shm://killed", timeout=60, directory=sockets))
            assert process.stdout
            assert process.stdout.readline() == "50\n"
            until(lambda: shm.links[0].stats()["transfers"]["leased"] == 1, "it keeps one")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        until(partial(is_settled, shm.links[0]), "it is nobody's any more")
    assert producer.stats()["answered"] == 2
