"""`LookupProducer`: answers consumers' questions from a `PrefixStore`, over any link."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.errors import (
    ClosedError,
    DuplicateKeyError,
    KVLinkError,
    PeerLostError,
    SchemaError,
    VersionError,
)
from omni_kvlink.link import MAX_TIMEOUT, KVConsumer
from omni_kvlink.lookup import messages
from omni_kvlink.lookup.cached_prompt import cache_payload
from omni_kvlink.system import process
from omni_kvlink.system.threads import start_thread, uninterrupted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_kvlink.link import Payload
    from omni_kvlink.lookup.store import PrefixStore

UNLIMITED_READERS = 2**31 - 1
"""Readers of the hello, which stays for as long as the link."""

RETRY_INTERVAL = 0.5
"""Seconds until a consumer is listened to again, of whom a question failed."""

TTL = 5.0
"""Seconds that an answer is kept: its consumer waits for it already, or has given the call up."""


class _OpenQuestion(NamedTuple):
    """A question that arrived, until `expires` on the monotonic clock."""

    question: messages.Question
    prompt: bytes
    expires: float


class LookupProducer:
    """Lets other processes select from a store; a context manager that closes its links.

    One thread listens to each consumer, one answers; all of them sleep until something arrives. An
    answer names what the store keeps, which consumers map, or fetch. Only the answer to one that
    would fetch more tokens than match is a copy: of those that do.

    Args:
        store: filled by the prefill; K and V stay in it until they are evicted. Answers go by its
            link, which is closed with this producer.
        consumers: connected to the links that the consumers serve; their questions come by them.
        model: names what made the K and V: weights, dtype, and all else that decides their bytes.
    """

    def __init__(
        self,
        store: PrefixStore,
        consumers: Iterable[KVConsumer] = (),
        *,
        model: str,
    ):
        self._store, self._link = store, store.link
        self._inbox = f"lookup/{uuid.uuid4().hex}"
        self._queue: SimpleQueue[_OpenQuestion | None] = SimpleQueue()
        self._waiting: list[_OpenQuestion] = []
        self._consumers: list[KVConsumer] = []
        self._closed, self._process = False, process.current
        process.close_in_children(self)
        self._is_closing = threading.Event()
        self.answered, self.nbytes, self.ignored = 0, 0, 0
        self._recheck = partial(self._queue.put, _RECHECK)
        hello = messages.LookupHello(self._inbox, model, messages.VERSION)
        payload = messages.message_payload(messages.HELLO, hello)
        self._link.put(payload, readers=UNLIMITED_READERS, ttl=MAX_TIMEOUT)
        self._threads = [threading.Thread(target=self._answer_all, daemon=True)]
        start_thread(self._threads[0])
        store.watch(self._recheck)
        for consumer in consumers:
            self.listen(consumer)

    def listen(self, consumer: KVConsumer) -> None:
        """Answer the questions that come by this link, which a consumer serves."""
        self._process.check("this LookupProducer")
        if self._closed:
            raise ClosedError("this LookupProducer is closed")
        self._consumers.append(consumer)
        thread = threading.Thread(target=self._listen, args=(consumer,), daemon=True)
        start_thread(thread)
        self._threads.append(thread)

    def stats(self) -> dict[str, int]:
        """The store's numbers; `answered` questions, `ignored` messages; `nbytes` of copies."""
        self._process.check("this LookupProducer")
        counters = {"answered": self.answered, "nbytes": self.nbytes, "ignored": self.ignored}
        return {**self._store.stats(), **counters}

    def __repr__(self) -> str:
        return f"<LookupProducer of {self._store!r}>"

    def close(self) -> None:
        """Close all links; a consumer that waits for an answer raises PeerLostError."""
        if not self._closed:  # nor in a forked child, which has none of its threads
            uninterrupted(self._close)

    def _close(self) -> None:
        self._closed = True
        self._is_closing.set()
        self._store.unwatch(self._recheck)
        for consumer in self._consumers:
            consumer.close()
        self._link.close()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> LookupProducer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _listen(self, consumer: KVConsumer) -> None:
        """Receive every question of one consumer, also after it was restarted."""
        while not self._closed:
            try:
                with consumer.get(self._inbox, timeout=MAX_TIMEOUT, verify="full") as data:
                    try:
                        question = messages.read_message(data, messages.Question)
                        prompt = messages.read_prompt(data, question)
                    except SchemaError:
                        self.ignored += 1
                        continue  # as read: given back, it would come again
                expires = time.monotonic() + min(question.timeout, MAX_TIMEOUT)
                self._queue.put(_OpenQuestion(question, prompt, expires))
            except ClosedError:
                return
            except PeerLostError:
                continue  # the next `get` waits until it is back
            except KVLinkError:
                # A question that failed is remembered until the next one is put: until then,
                # each `get` would end alike at once.
                self.ignored += 1
                self._is_closing.wait(RETRY_INTERVAL)

    def _answer_all(self) -> None:
        while (request := self._queue.get()) is not None:
            waiting, self._waiting = self._waiting, []
            for open_question in waiting if request is _RECHECK else (*waiting, request):
                if open_question.expires > time.monotonic():
                    self._try_answer(open_question)

    def _try_answer(self, request: _OpenQuestion) -> None:
        """Answer a question, or keep it waiting; a failure is reported to the consumer."""
        try:
            if request.question.version != messages.VERSION:
                raise VersionError(messages.other_version(request.question.version))
            if request.question.wait and not self._store.covers(request.prompt):
                self._waiting.append(request)
            else:
                self._answer(request)
        except (DuplicateKeyError, ClosedError):
            self.ignored += 1
        except KVLinkError as error:
            with contextlib.suppress(ClosedError):
                self._link.fail(request.question.answer, str(error))

    def _answer(self, request: _OpenQuestion) -> None:
        key, hit = request.question.answer, self._store.find(request.prompt)
        if request.question.copy and hit.is_part:
            self._answer_by_copy(key, request.prompt, hit)
        else:
            self._link.put(messages.message_payload(key, hit), ttl=TTL, timeout=0.0)
        self.answered += 1

    def _answer_by_copy(self, key: str, prompt: bytes, hit: messages.Found) -> None:
        """Put the tokens that match, as a payload of their own, each byte checked."""
        with self._store.lease(prompt, hit, verify=True) as match:
            if match.data is None:  # it was evicted since
                payload: Payload = messages.message_payload(key, messages.Found(0))
            else:
                payload = cache_payload(key, match.data, match.hidden)
                self.nbytes += sum(view.nbytes for view in payload.tensors())
            self._link.put(payload, ttl=TTL, timeout=0.0)


_RECHECK = _OpenQuestion(messages.Question("", 0.0), b"", 0.0)
"""Not a question: look at the waiting ones again."""
