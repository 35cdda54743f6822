"""`LookupProducer`: answers consumers' questions from a `PrefixStore`, over any link."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
import warnings
from collections.abc import Iterable
from queue import SimpleQueue
from typing import NamedTuple

from omni_kvlink.errors import (
    ClosedError,
    DuplicateKeyError,
    KVLinkError,
    PeerLostError,
    SchemaError,
)
from omni_kvlink.link import MAX_TIMEOUT, KVLink, Received
from omni_kvlink.lookup import messages as words
from omni_kvlink.lookup.store import PrefixStore

EVERYBODY = 2**31 - 1
"""Readers of a payload that stays."""

TTL = 5.0
"""Seconds of an answer: who asked waits for it already, or will never take it."""


class _Asked(NamedTuple):
    """A question that came, until `expires` on the monotonic clock."""

    question: words.Question
    prompt: bytes
    expires: float


class LookupProducer:
    """Lets other processes select from a store; a context manager that closes its links.

    One thread listens to each consumer, one answers; all of them sleep until something comes. An
    answer is copied once, from the store into the link's memory, and only the tokens that match.

    Args:
        store: filled by whoever prefills; K and V stay in it until they are evicted.
        link: served here; answers go by it.
        consumers: connected to the links that the consumers serve; their questions come by them.
        model: names what made the K and V: weights, dtype, and all else that decides their bytes.
    """

    def __init__(
        self, store: PrefixStore, link: KVLink, consumers: Iterable[KVLink] = (), *, model: str
    ):
        self._store, self._link = store, link
        self._inbox = f"lookup/{uuid.uuid4().hex}"
        self._todo: SimpleQueue[_Asked | None] = SimpleQueue()
        self._pending: list[_Asked] = []
        self._consumers: list[KVLink] = []
        self._closed = False
        self.answered, self.nbytes, self.ignored = 0, 0, 0
        hello = words.LookupHello(self._inbox, model)
        link.put(words.say(words.HELLO, hello), readers=EVERYBODY, ttl=MAX_TIMEOUT)
        self._threads = [threading.Thread(target=self._answer_all, daemon=True)]
        self._threads[0].start()
        store.watch(self._look_again)
        for consumer in consumers:
            self.listen(consumer)

    def listen(self, consumer: KVLink) -> None:
        """Answer one consumer more: a link connected to the one that it serves."""
        if self._closed:
            raise ClosedError("this LookupProducer is closed")
        self._consumers.append(consumer)
        self._threads.append(threading.Thread(target=self._listen, args=(consumer,), daemon=True))
        self._threads[-1].start()

    def stats(self) -> dict[str, int]:
        """The store's numbers; `answered` questions, the bytes sent, `ignored` words."""
        own = {"answered": self.answered, "nbytes": self.nbytes, "ignored": self.ignored}
        return {**self._store.stats(), **own}

    def close(self) -> None:
        """Close all links; who waits for an answer gets PeerLostError."""
        if self._closed:
            return
        self._closed = True
        self._store.unwatch(self._look_again)
        for link in (*self._consumers, self._link):
            link.close()
        self._todo.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> LookupProducer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _look_again(self) -> None:
        """Something was inserted: it may be what a question waits for."""
        self._todo.put(_AGAIN)

    def _listen(self, consumer: KVLink) -> None:
        """Take every question of one consumer, over all its lives."""
        while not self._closed:
            try:
                self._hear(consumer.get(self._inbox, timeout=MAX_TIMEOUT, verify="full"))
            except ClosedError:
                return
            except PeerLostError:
                continue  # the next `get` waits until it is back
            except SchemaError:
                self.ignored += 1
            except KVLinkError as error:  # asked again at once, it would be the same
                warnings.warn(
                    f"questions by {consumer.url} are not answered any more: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return

    def _hear(self, received: Received) -> None:
        with received as data:
            question, prompt = words.hear(data, words.Question), words.prompt_of(data)
        expires = time.monotonic() + min(question.timeout, MAX_TIMEOUT)
        self._todo.put(_Asked(question, prompt, expires))

    def _answer_all(self) -> None:
        while (asked := self._todo.get()) is not None:
            again, self._pending = self._pending, []
            for one in again if asked is _AGAIN else (*again, asked):
                if one.expires > time.monotonic():
                    self._try(one)

    def _try(self, asked: _Asked) -> None:
        """Answer a question, or keep it; a failure is told to who asked."""
        key = asked.question.answer
        try:
            if asked.question.wait and not self._store.covers(asked.prompt):
                self._pending.append(asked)
                return
            self._answer(asked)
        except (DuplicateKeyError, ClosedError):
            self.ignored += 1
        except KVLinkError as error:
            with contextlib.suppress(ClosedError):
                self._link.fail(key, str(error))

    def _answer(self, asked: _Asked) -> None:
        key = asked.question.answer
        if asked.question.probe:
            found = words.say(key, words.Found(self._store.longest(asked.prompt)))
            self._link.put(found, ttl=TTL, timeout=0.0)
            return
        with self._store.lease(asked.prompt) as match:
            receipt = self._link.put(words.answer(key, match), ttl=TTL, timeout=0.0)
        self.answered += 1
        self.nbytes += receipt.ledger.nbytes


_AGAIN = _Asked(words.Question("", 0.0), b"", 0.0)
"""Not a question: those that were kept shall be looked at again."""
