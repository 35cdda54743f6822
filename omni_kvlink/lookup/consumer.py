"""`LookupConsumer`: requests the longest prefix of a prompt from producers, over any link."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
import warnings
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.connectors.protocol.path import MAPPED
from omni_kvlink.errors import (
    DuplicateKeyError,
    KVLinkError,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
    VersionError,
    format_seconds,
)
from omni_kvlink.link import (
    MAX_TIMEOUT,
    KVConsumer,
    KVProducer,
    Received,
    Verify,
    begin_get,
    can_retry,
    check_verify,
    open_delivery,
)
from omni_kvlink.lookup import messages
from omni_kvlink.lookup.cached_prompt import read_match
from omni_kvlink.lookup.match import Match
from omni_kvlink.lookup.messages import Found
from omni_kvlink.lookup.tokens import TokenIds, count, encode
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.settings import Flag
from omni_kvlink.system.threads import uninterrupted
from omni_kvlink.system.waits import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from omni_kvlink.connectors.base import PendingGet
    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.lookup.tokens import Namespace
    from omni_kvlink.payload.tensor_data import TensorTransferData

RECONNECT_TIMEOUT, RETRY_INTERVAL = 0.1, 5.0
"""Seconds that a select waits for a lost producer, and how often at most it tries again."""


class _PendingAnswer(NamedTuple):
    """A question that was sent, and the pending get of its answer."""

    store: _RemoteStore
    key: str
    get: PendingGet

    def receive(self, deadline: Deadline, verify: Verify) -> Received:
        """Wait for the answer; ask for it again if only the connection broke."""
        started, link, get = time.perf_counter(), self.store.link, self.get
        while True:
            try:
                delivery = get.wait(timeout=deadline.seconds_left())
            except PeerLostError:  # noqa: PERF203 (a round for each lost connection)
                seconds = min(RECONNECT_TIMEOUT, deadline.seconds_left())
                if not can_retry(link, get, timeout=seconds):
                    raise
                get = begin_get(link, self.key, timeout=seconds)
            else:
                return open_delivery(link, delivery, started=started, verify=verify)


class _RemoteStore:
    """One producer: the link that its answers come by, and the link that questions go by."""

    def __init__(self, link: KVConsumer, questions: KVProducer, model: str):
        self.link = link
        self._retry_at = 0.0
        self._questions, self._model = questions, model
        # An RLock, for interrupts: see docs/threads.md.
        self._sending = threading.RLock()
        self._session = -1
        self._inbox = ""
        self._last_question: Receipt | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether this process maps what the producer keeps, and does not fetch it."""
        path = self.link.stats()["path"]
        return path is not None and path["transport"] in MAPPED

    def send(
        self, question: messages.Question, prompt: bytes, deadline: Deadline
    ) -> _PendingAnswer:
        """Send a question to the producer; PeerLostError if it is gone."""
        if time.monotonic() < self._retry_at:
            raise PeerLostError(f"{self.link.url} was gone a moment ago")
        timeout = min(RECONNECT_TIMEOUT, deadline.seconds_left())
        get = begin_get(self.link, question.answer, timeout=timeout)
        try:
            self._put_question(question, prompt, deadline)
        except BaseException:
            get.cancel()
            raise
        self._retry_at = 0.0
        return _PendingAnswer(self, question.answer, get)

    def _put_question(self, question: messages.Question, prompt: bytes, deadline: Deadline) -> None:
        """Put a question once the producer has read the last one: they share the inbox's key."""
        started = time.monotonic()
        try:
            if not self._sending.acquire(timeout=deadline.seconds_left()):
                waited = time.monotonic() - started
                raise TransferTimeout(
                    f"{self.link.url} has not read the question of another thread: no answer "
                    f"after {format_seconds(waited)}",
                    waited=waited,
                    phase="requested",
                )
            self._read_hello(deadline)
            if self._last_question is not None:
                with contextlib.suppress(TransferFailed):  # that is its own select's error
                    self._last_question.wait(timeout=deadline.seconds_left())
            payload = messages.message_payload(self._inbox, question, prompt)
            self._put(payload, timeout=deadline.seconds_left())
        finally:
            with contextlib.suppress(RuntimeError):  # it was not acquired
                self._sending.release()

    def _put(self, payload: TensorTransferData, *, timeout: float) -> None:
        put = partial(self._questions.put, payload, ttl=MAX_TIMEOUT, timeout=timeout)
        try:
            self._last_question = put()
        except DuplicateKeyError:  # an exception of a signal handler ended the select that asked
            self._questions.abort(self._inbox, "the select that asked was interrupted")
            self._last_question = put()

    def _read_hello(self, deadline: Deadline) -> None:
        """Learn the producer's inbox, and check its model; once for each connection."""
        session = self.link.stats()["sessions"]
        if session == self._session:
            return
        with self.link.get(messages.HELLO, timeout=deadline.seconds_left()) as data:
            hello = messages.read_message(data, messages.LookupHello)
        if hello.version != messages.VERSION:
            raise VersionError(f"{self.link.url}: {messages.other_version(hello.version)}")
        if hello.model != self._model:
            raise SchemaError(
                f"{self.link.url} has K and V of {hello.model!r}; wanted {self._model!r}"
            )
        if self._inbox not in ("", hello.inbox):
            self._questions.fail(self._inbox, "the producer that read this inbox is gone")
            self._last_question = None
        self._session, self._inbox = session, hello.inbox


class LookupConsumer:
    """`select` from the stores of other processes; thread-safe; a context manager, closing links.

    Of several producers, each is asked for the number of tokens that it has, and what the best one
    has is got. A producer that is gone is left out, with a warning; if no other is left, its
    error is raised.

    Args:
        link: served here; questions go by it.
        producers: connected to the links that the producers serve; answers come by them.
        model: as the producers were given; another one is refused.
        verify: "full" checks every byte of a match against its digest; see `KVConsumer.get`.
    """

    def __init__(
        self,
        link: KVProducer,
        producers: Iterable[KVConsumer],
        *,
        model: str,
        verify: Verify = "auto",
    ):
        check_verify(verify)
        self._link, self._model, self._verify = link, model, verify
        self._stores = [_RemoteStore(producer, link, model) for producer in producers]

    def __repr__(self) -> str:
        return f"<LookupConsumer of {self._model!r}: {len(self._stores)} producers>"

    def add(self, producer: KVConsumer) -> None:
        """Add a producer: the consumer's end of the link that it serves."""
        self._stores.append(_RemoteStore(producer, self._link, self._model))

    def select(
        self,
        tokens: TokenIds,
        roi: torch.Tensor | None = None,
        *,
        namespace: Namespace = "",
        wait: bool = False,
        timeout: float,
    ) -> Match:
        """The longest prefix that any producer has; an empty match if none has any.

        The match's tensors are readonly views of the link's memory, as those of `KVConsumer.get`:
        over shared memory of the producer's own, with nothing copied.
        Arguments are as for `PrefixStore.select`; `timeout` is the seconds for all of it.

        Raises:
            TransferTimeout: a producer did not answer, or with `wait` none has all tokens.
            TransferFailed: a producer reported why it cannot answer, or that a prefill failed.
            PeerLostError: every producer is gone.
            IntegrityError: a byte is not the one that was stored; see `verify`.
            SchemaError: a producer is of another model; or the namespace is none.
            VersionError: a producer's lookups are of another version.
        """
        deadline = Deadline(timeout)
        Flag().read(wait, "wait")
        prompt = encode(tokens, roi, namespace)
        stores = list(self._stores)
        if not stores:
            raise SchemaError("no producer to ask: add(link)")
        while True:
            hit: Found | None = None
            store: _RemoteStore | None = stores[0]
            if len(stores) > 1:
                store, hit = self._best(stores, prompt, wait, deadline)
            if store is None:
                return Match(count(prompt))
            try:
                match = self._fetch(store, hit, prompt, wait, deadline)
            except PeerLostError as error:
                if not self._exclude(store, stores, error):
                    raise
            else:
                if match is not None:
                    return match

    def stats(self) -> dict[str, Any]:
        """The stats of each producer's link, by its URL."""
        return {store.link.url: store.link.stats() for store in self._stores}

    def close(self) -> None:
        """Close all links; a waiting `select` raises ClosedError."""
        uninterrupted(self._close)

    def _close(self) -> None:
        for store in self._stores:
            store.link.close()
        self._link.close()

    def __enter__(self) -> LookupConsumer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fetch(
        self,
        store: _RemoteStore,
        hit: Found | None,
        prompt: bytes,
        wait: bool,
        deadline: Deadline,
    ) -> Match | None:
        """K and V from one producer, of what the producer found; None if it was evicted since."""
        requested, is_mapped = count(prompt), store.is_mapped
        if hit is None or (hit.is_part and not is_mapped):
            question = _question(prompt, deadline, wait=wait, copy=not is_mapped)
            received = store.send(question, prompt, deadline).receive(deadline, self._verify)
            if isinstance(received.data, KVCacheBundle):
                return read_match(received, None, requested)
            with received as data:
                hit = messages.read_found(data, requested)
        if not hit.tokens:
            return Match(requested)
        verify: Verify = "off" if self._verify == "off" else "auto"
        limit = deadline.seconds_left()
        try:
            received = store.link.get(hit.entry, timeout=limit, verify=verify, wait=False)
        except TransferFailed:  # or a reader found it damaged: the producer has dropped it
            return None
        return read_match(received, hit, requested, verify=self._verify == "full")

    def _best(
        self, stores: list[_RemoteStore], prompt: bytes, wait: bool, deadline: Deadline
    ) -> tuple[_RemoteStore | None, Found]:
        """The store that has most of a prompt, or None; exclude those that are gone."""
        pending: dict[Future[Any], _PendingAnswer] = {}
        best: tuple[_RemoteStore | None, Found] = None, Found(0)
        try:
            for store in list(stores):
                try:
                    answer = store.send(_question(prompt, deadline, wait=wait), prompt, deadline)
                    pending[answer.get.future] = answer
                except PeerLostError as error:  # noqa: PERF203 - of each store
                    if not self._exclude(store, stores, error):
                        raise
            while pending and best[1].tokens < count(prompt) and not (wait and best[0]):
                for future in _first_done(pending, deadline):
                    answer = pending.pop(future)
                    try:
                        with answer.receive(deadline, "auto") as data:
                            hit = messages.read_found(data, count(prompt))
                    except PeerLostError as error:
                        if not self._exclude(answer.store, stores, error):
                            raise
                    else:
                        if hit.tokens > best[1].tokens:
                            best = answer.store, hit
        finally:
            for answer in pending.values():
                answer.get.cancel()
        return best

    def _exclude(self, store: _RemoteStore, stores: list[_RemoteStore], error: KVLinkError) -> bool:
        """Remove a store from those of this `select`; return whether one is left.

        Raised here, the error would refer to itself by its traceback.
        """
        was_there, now = not store._retry_at, time.monotonic()
        if store._retry_at <= now:  # else nobody asked it: calls in between postpone nothing
            store._retry_at = now + RETRY_INTERVAL
        if was_there:
            warnings.warn(
                f"{store.link.url} is gone, its prefixes are computed again until it is back: "
                f"{error}",
                RuntimeWarning,
                stacklevel=2,
            )
        stores.remove(store)
        return bool(stores)


def _question(
    prompt: bytes, deadline: Deadline, *, wait: bool, copy: bool = False
) -> messages.Question:
    key, namespace = f"lookup/{uuid.uuid4().hex}", messages.namespace_of(prompt)
    seconds = deadline.seconds_left()
    return messages.Question(key, seconds, wait, copy, namespace, messages.VERSION)


def _first_done(pending: dict[Future[Any], _PendingAnswer], deadline: Deadline) -> set[Future[Any]]:
    """Wait for the next answers; TransferTimeout if there are none by the deadline."""
    done, _ = wait_for(pending, timeout=deadline.seconds_left(), return_when=FIRST_COMPLETED)
    if not done:
        silent = ", ".join(answer.store.link.url for answer in pending.values())
        raise TransferTimeout(f"no answer from {silent}", phase="requested")
    return done
