"""Real signals, whose handler raises, at random microseconds of each verb: nothing is left behind.

The lines of the package are interrupted one by one in `test_interrupts`; a signal also comes
between two steps of one line, and in the standard library. Run this file for the counts of a link:

    python tests/link/test_real_signals.py shm|ipc|inproc [SIGNALS [VERB …]]
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import BusyError, KVCacheTransferData, KVLink, KVLinkError, TensorTransferData
from omni_kvlink.link.end import LinkEnd
from omni_kvlink.lookup import LookupConsumer, LookupProducer, PrefixStore
from omni_kvlink.lowlevel import begin_get, open_delivery
from omni_kvlink.testing.caches import Recipe, fingerprint, layers_of
from omni_kvlink.testing.rig import until, until_requested

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from types import FrameType

    from omni_kvlink import KVConsumer, KVProducer, Payload
    from omni_kvlink.lowlevel import PendingGet

# Reaches into _end, _session, _wake: a session's descriptor comes and goes with no public sign.
SIGNALS = 500
ELEMENTS = {"small": 100, "large": 40_000}
"""A payload that travels inside its offer, and one that lies in the link's memory."""
URLS = {
    "inproc": "inproc://signals",
    "shm": "shm://signals",
    "ipc": "zmq+ipc://{root}/signals",
}
PROMPT = list(range(20))
SENT = ("blocks", "transfers live", "transfers leased", "transfers pinned")
"""What is 0 when nothing is sent."""
TTL = 600.0
PATIENCE = 30.0
"""Seconds in which what was interrupted ends."""


class Alarm:
    """Raises KeyboardInterrupt at a random moment of a call."""

    def __init__(self) -> None:
        self.is_armed, self.chance, self.seconds = False, random.Random(7), 1e-3

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        before, hook = signal.signal(signal.SIGALRM, self), sys.unraisablehook
        # pytest's keeps the exceptions of finalizers, and so the payloads in their frames.
        sys.unraisablehook = lambda unraisable: None
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            sys.unraisablehook = hook

    def interrupts(self, call: Callable[[], object]) -> bool:
        """Whether the call was interrupted; if Python ignored that, in a finalizer, too."""
        began = time.perf_counter()
        try:
            self.is_armed = True
            signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(2e-6, 1.2 * self.seconds))
            call()
            was_interrupted = not self.is_armed
        except KeyboardInterrupt:
            was_interrupted = True
        self.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not was_interrupted:
            self.seconds = 0.7 * self.seconds + 0.3 * (time.perf_counter() - began)
        return was_interrupted


class Bench:
    """Both ends of a link; each verb leaves what it did to `settle`, which ends it."""

    lookup: LookupConsumer
    waiting: PendingGet | None = None
    """Of a reader that waits for payload 0."""

    def __init__(self, links: contextlib.ExitStack, url: str, elements: int, root: str):
        self.options: dict[str, Any] = {"directory": root, "quota": 64 << 20}
        self.url, self._links, self._ends = url, links, list[LinkEnd]()
        self.producer, self.consumer = self.open(url)
        self.elements, self.turn, self.held = elements, 0, list[Any]()

    def open(self, url: str) -> tuple[KVProducer, KVConsumer]:
        producer = self._links.enter_context(KVLink.serve(url, **self.options))
        consumer = KVLink.connect(producer.url, timeout=60, **self.options)
        self._links.enter_context(consumer)
        self._ends += producer, consumer
        return producer, consumer

    def open_lookup(self) -> None:
        (answers, answer_reader), (questions, question_reader) = (
            self.open(f"{self.url}-{name}") for name in ("answers", "questions")
        )
        store = PrefixStore(answers)
        size = len(PROMPT), 1, self.elements // 100  # 1 or 400: many wait for their end
        store.insert(PROMPT, None, [torch.zeros(size)], [torch.ones(size)], torch.zeros(1, 8))
        self._links.enter_context(LookupProducer(store, [question_reader], model="m"))
        self.lookup = LookupConsumer(questions, [answer_reader], model="m")

    def in_use(self, names: Collection[str] = ()) -> Counter[str]:
        """What is not 0, of these names or of all."""
        found = Counter[str]()
        for end in self._ends:
            stats = end.stats()
            memory, transfers = stats.get("memory", {}), stats.get("transfers", {})
            found.update({name: memory.get(name, 0) for name in ("used", "blocks", "waiting")})
            states = ("live", "leased", "waiting", "pinned")
            found.update({f"transfers {state}": transfers.get(state, 0) for state in states})
        # One that never began is kept by `threading`, if an exception came at its start.
        running = (each for each in threading.enumerate() if each.ident is not None)
        found["threads"] = sum(each.name != "kvlink-memory" for each in running)
        # One that a session makes once a get receives by itself is no get's.
        sessions = [getattr(end._end, "_session", None) for end in self._ends]
        lazy = sum(getattr(session, "_wake", None) is not None for session in sessions)
        found["descriptors"] = len(os.listdir("/proc/self/fd")) - lazy
        found["files"] = len(os.listdir(self.options["directory"]))
        return Counter({name: found[name] for name in names or found if found[name]})

    def payload(self, number: int) -> TensorTransferData:
        tensor = torch.arange(self.elements) + 1000 * self.turn + number
        return TensorTransferData(self.key(number), {"h": tensor})

    def check(self, data: Payload, number: int) -> None:
        is_cache = isinstance(data, KVCacheTransferData)
        expected = self.cache() if is_cache else self.payload(number)
        assert fingerprint(data) == fingerprint(expected)

    def key(self, number: int) -> str:
        return f"{self.turn}-{number}"

    def put_all(self) -> None:
        for number in range(3):
            self.producer.put(self.payload(number), ttl=TTL)

    def put(self) -> None:
        self.producer.put(self.payload(0), ttl=TTL)

    def put_to_waiting(self) -> None:
        self.producer.put(self.payload(0), ttl=TTL)

    def put_many(self) -> None:
        self.producer.put_many([self.payload(number) for number in range(3)], ttl=TTL)

    def get(self) -> None:
        with self.consumer.get(self.key(0), timeout=60) as data:
            self.check(data, 0)

    def get_many(self) -> None:
        with self.consumer.get_many([self.key(n) for n in range(3)], timeout=60) as payloads:
            for number, data in enumerate(payloads):
                self.check(data, number)

    def scatter_many(self) -> None:
        targets = [[torch.zeros(self.elements, dtype=torch.int64)] for _ in range(3)]
        with (batch := self.consumer.get_many([self.key(n) for n in range(3)], timeout=60)):
            batch.scatter(targets)
            for number, [target] in enumerate(targets):
                self.check(TensorTransferData(self.key(number), {"h": target}), number)

    def keep(self) -> None:
        self.producer.put(self.payload(0), readers=None)

    def withdraw(self) -> None:
        self.producer.withdraw(self.key(0))

    def contains(self) -> None:
        assert self.consumer.contains([self.key(0), self.key(1)], timeout=60) == [True, False]

    def get_at_once(self) -> None:
        with self.consumer.get(self.key(0), timeout=60, wait=False) as data:
            self.check(data, 0)

    def release(self) -> None:
        self.held.pop().release()

    def drop(self) -> None:
        self.held.clear()

    def allocate(self) -> None:
        self.producer.allocate(self.payload(0)).release()

    def append(self) -> None:
        with self.producer.open_stream(self.key(0), {"h": self.payload(0)["h"]}, ttl=TTL) as out:
            for number in range(3):
                out.append({"h": self.payload(number)["h"]})

    def read_stream(self) -> None:
        with self.consumer.read_stream(self.key(0), timeout=60) as stream:
            for chunk in stream:
                assert torch.equal(chunk.data["h"], self.payload(chunk.number)["h"])

    def stream_put(self) -> None:
        data = self.cache()
        with self.producer.stream_put(data, ttl=TTL) as out:
            for (_, number), views in layers_of(data).items():
                out.write_layer(number, *views)

    def stream_get(self) -> None:
        with self.consumer.stream_get(self.key(0), timeout=60) as stream:
            for layer in stream:
                assert layer.key.shape == layer.value.shape
            self.check(stream.wait(), 0)

    def cache(self) -> KVCacheTransferData:
        data = Recipe(self.key(0), self.turn, tokens=5 + self.elements // 64).make()
        assert isinstance(data, KVCacheTransferData)
        return data

    def select(self) -> None:
        with self.lookup.select(PROMPT, timeout=60) as match:
            assert match.is_complete

    def serve(self) -> None:
        with contextlib.suppress(BusyError), KVLink.serve(f"{self.url}-other", **self.options):
            pass  # the one that was interrupted may not be closed yet

    def connect(self) -> None:
        with KVLink.connect(self.producer.url, timeout=60, **self.options):
            pass

    def close(self) -> None:
        while self.held:
            self.held[-1].close()
            self.held.pop()

    def _is_decided(self) -> bool:
        is_live = self.producer.stats()["transfers"]["live"]
        assert self.waiting is not None
        return not is_live or self.waiting.future.done()

    def settle(self) -> Counter[str]:
        """End what is left of this turn, as another reader would; its bytes are right."""
        found = Counter[str]()
        if self.waiting is not None:
            until(self._is_decided, "it was put, or is not")
            if self.waiting.future.done():
                delivery, now = self.waiting.wait(timeout=60), time.perf_counter()
                with open_delivery(self.consumer, delivery, started=now) as data:
                    self.check(data, 0)
                found["received"] += 1
            self.waiting.cancel()
            self.waiting = None
        self.held.clear()
        for number in range(3):
            with contextlib.suppress(KVLinkError):
                with self.consumer.get(self.key(number), timeout=0.0) as data:
                    self.check(data, number)
                found["received later"] += 1
                del data
            self.producer.abort(self.key(number), "the turn is over")
        self.turn += 1
        return found


def before(bench: Bench, verb: str) -> None:
    """What a verb needs: a payload, one that was received, or a stream."""
    if verb in ("get", "get_many", "scatter_many"):
        bench.put_all()
    elif verb in ("withdraw", "contains", "get_at_once"):
        bench.keep()
    elif verb == "put_to_waiting":
        bench.waiting = begin_get(bench.consumer, bench.key(0), timeout=60)
        until_requested(bench.producer, 1)
    elif verb in ("release", "drop"):
        bench.put_all()
        bench.held.append(bench.consumer.get(bench.key(0), timeout=60))
    elif verb == "read_stream":
        bench.append()
    elif verb == "stream_get":
        bench.stream_put()
    elif verb == "close":
        bench.held.append(KVLink.serve(f"{bench.url}-{bench.turn}", **bench.options))
        bench.held.append(KVLink.connect(bench.producer.url, timeout=60, **bench.options))


def run(kind: str, size: str, verb: str, signals: int, root: str) -> Counter[str]:
    """Interrupt a verb so many times; raise AssertionError if anything is left."""
    counts, alarm = Counter[str](), Alarm()
    with contextlib.ExitStack() as links:
        bench = Bench(links, URLS[kind].format(root=root), ELEMENTS[size], root)
        if verb == "select":
            bench.open_lookup()
        for _ in range(3):
            before(bench, verb)
            began = time.perf_counter()
            getattr(bench, verb)()
            alarm.seconds = time.perf_counter() - began
            bench.settle()
        gc.collect()
        kept = {"blocks": 2, "transfers live": 2} if verb == "select" else {}  # `hello`, the entry
        until(lambda: not bench.in_use(SENT) - Counter(kept), "the first turns have ended")
        idle = bench.in_use()
        with alarm.installed():
            while counts["interrupted"] < signals:
                before(bench, verb)
                counts["interrupted" if alarm.interrupts(getattr(bench, verb)) else "whole"] += 1
                counts += bench.settle()
        gc.collect()
        with contextlib.suppress(AssertionError):  # `left` says what it is
            until(lambda: bench.in_use() == idle, "all is as before", PATIENCE)
        found = bench.in_use()
        left = {name: found[name] - idle[name] for name in found | idle}
        names = [each.name for each in threading.enumerate()]
        assert found == idle, f"{left}; {names}"
    return counts


VERBS = (
    *("put", "put_to_waiting", "put_many", "get", "get_many", "scatter_many", "release", "drop"),
    *("allocate", "append", "read_stream", "stream_put", "stream_get"),
    *("keep", "withdraw", "contains", "get_at_once"),
    *("serve", "connect", "close", "select"),
)


def test_what_is_in_use_is_seen(sockets: str) -> None:
    """Else the next test finds nothing left whatever is."""
    with contextlib.ExitStack() as links:
        bench = Bench(links, URLS["shm"], ELEMENTS["large"], sockets)
        idle = bench.in_use()
        bench.producer.put(bench.payload(0))
        assert bench.in_use(SENT) == Counter({"blocks": 1, "transfers live": 1})
        assert (bench.in_use() - idle).keys() >= {"used", "blocks", "transfers live"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("zmq_started", "leaves_nothing")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", ELEMENTS)
@pytest.mark.parametrize("kind", URLS)
def test_real_signals_leave_nothing(sockets: str, kind: str, size: str, verb: str) -> None:
    run(kind, size, verb, SIGNALS, sockets)


def main(kind: str, signals: int, verbs: Sequence[str]) -> None:
    warnings.simplefilter("ignore", ResourceWarning)
    with tempfile.TemporaryDirectory(prefix="kvl-") as root:
        for size in ELEMENTS:
            for verb in verbs:
                try:
                    counts: object = dict(run(kind, size, verb, signals, root))
                except AssertionError as error:
                    counts = f"LEFT: {error}"
                print(f"{kind} {size} {verb}: {counts}", flush=True)


if __name__ == "__main__":
    signals = int(sys.argv[2]) if len(sys.argv) > 2 else SIGNALS
    main(sys.argv[1], signals, sys.argv[3:] or VERBS)
