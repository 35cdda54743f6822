"""`LookupConsumer`: asks producers for the longest prefix of a prompt, over any link."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import uuid
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from omni_kvlink.connectors.base import PendingGet, Receipt
from omni_kvlink.errors import KVLinkError, PeerLostError, SchemaError, TransferTimeout
from omni_kvlink.link import MAX_TIMEOUT, KVLink, Received, Verify, check_verify
from omni_kvlink.lookup import messages as words
from omni_kvlink.lookup.match import Match
from omni_kvlink.lookup.tokens import TokenIds, count, encode

PATIENCE, PAUSE = 0.1, 5.0
"""Seconds that a select waits for a producer that was lost, and how often at most."""


class _Asked(NamedTuple):
    """A question on its way; wants count their timeouts from `since`."""

    want: PendingGet
    since: float


class _Source:
    """One producer: the link that its answers come by, and how questions reach it."""

    def __init__(self, link: KVLink, questions: KVLink, model: str):
        self.link = link
        self._retry = 0.0
        self._questions, self._model = questions, model
        self._lock = threading.Lock()
        self._life = -1
        self._inbox = ""
        self._last: Receipt | None = None

    def ask(self, question: words.Question, prompt: bytes, deadline: float) -> _Asked:
        """Put a question where the producer listens.

        Raises:
            PeerLostError: it is gone.
        """
        if time.monotonic() < self._retry:
            raise PeerLostError(f"{self.link.url} was gone a moment ago")
        patience = min(PATIENCE, deadline - time.monotonic())
        want = self.link.begin_get(question.answer, timeout=patience)
        since = time.monotonic()
        try:
            with self._lock:
                self._greet(deadline)
                if self._last is not None:  # the producer takes one question after the other
                    self._last.wait(timeout=deadline - time.monotonic())
                asked = words.ask(self._inbox, question, prompt)
                self._last = self._questions.put(asked, ttl=MAX_TIMEOUT)
        except BaseException:
            want.cancel()
            raise
        self._retry = 0.0
        return _Asked(want, since)

    def lose(self) -> bool:
        """It is gone, and not asked for a while; whether that is news."""
        is_news, self._retry = not self._retry, time.monotonic() + PAUSE
        return is_news

    def open(self, asked: _Asked, deadline: float, verify: Verify) -> Received:
        """The answer, when it is there."""
        started = time.perf_counter()
        delivery = asked.want.wait(timeout=deadline - asked.since)
        return self.link.open_delivery(delivery, started=started, verify=verify)

    def _greet(self, deadline: float) -> None:
        """Once in each life of the producer: where it listens, and whether it is of our model."""
        life = self.link.stats()["sessions"]
        if life == self._life:
            return
        with self.link.get(words.HELLO, timeout=deadline - time.monotonic()) as data:
            hello = words.hear(data, words.LookupHello)
        if hello.model != self._model:
            raise SchemaError(
                f"{self.link.url} has K and V of {hello.model!r}; wanted {self._model!r}"
            )
        if self._inbox not in ("", hello.inbox):
            self._questions.fail(self._inbox, "whoever listened there is gone")
            self._last = None
        self._life, self._inbox = life, hello.inbox


class LookupConsumer:
    """`select` from the stores of other processes; thread-safe; a context manager, closing links.

    Several producers are asked at once how much they have, and the best one for the bytes. One that
    is gone is left out, with a warning; if no other is left, its error is raised.

    Args:
        link: served here; questions go by it.
        producers: connected to the links that the producers serve; answers come by them.
        model: as the producers were told; another one is refused.
        verify: "full" checks every byte of an answer against its digest; see `KVLink.get`.
    """

    def __init__(
        self, link: KVLink, producers: Iterable[KVLink], *, model: str, verify: Verify = "auto"
    ):
        check_verify(verify)
        self._link, self._model, self._verify = link, model, verify
        self._sources = [_Source(producer, link, model) for producer in producers]

    def add(self, producer: KVLink) -> None:
        """Ask one producer more: a link connected to the one that it serves."""
        self._sources.append(_Source(producer, self._link, self._model))

    def select(
        self,
        tokens: TokenIds,
        roi: torch.Tensor | None = None,
        *,
        wait: bool = False,
        timeout: float,
    ) -> Match:
        """The longest prefix that any producer has; an empty match if none has any.

        The match's tensors are readonly views of the link's memory, as those of `KVLink.get`.

        Args:
            tokens, roi: as for `PrefixStore.select`.
            wait: until a producer has all tokens asked for: decode before prefill.
            timeout: seconds for all of it.

        Raises:
            TransferTimeout: a producer did not answer, or with `wait` none has it.
            TransferFailed: a producer said why it cannot, or that it will not come.
            PeerLostError: every producer is gone.
            SchemaError: a producer is of another model.
        """
        prompt, deadline = encode(tokens, roi), time.monotonic() + min(timeout, MAX_TIMEOUT)
        sources = list(self._sources)
        if not sources:
            raise SchemaError("no producer to ask: add(link)")
        while True:
            source = self._best(sources, prompt, wait, deadline) if len(sources) > 1 else sources[0]
            if source is None:
                return Match(count(prompt))
            try:
                return self._fetch(source, prompt, wait, deadline)
            except PeerLostError as error:
                self._leave_out(source, sources, error)

    def stats(self) -> dict[str, Any]:
        """Of each producer's link, by its URL."""
        return {source.link.url: source.link.stats() for source in self._sources}

    def close(self) -> None:
        """Close all links; who waits in `select` gets ClosedError."""
        for link in (*(source.link for source in self._sources), self._link):
            link.close()

    def __enter__(self) -> LookupConsumer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fetch(self, source: _Source, prompt: bytes, wait: bool, deadline: float) -> Match:
        """K and V from one producer; what it had may be less by now, and is right all the same."""
        asked = source.ask(_question(deadline, wait=wait), prompt, deadline)
        received = source.open(asked, deadline, self._verify)
        try:
            data, hidden = words.match_of(received.data, count(prompt))
        except BaseException:
            received.release()
            raise
        if data is None:
            received.release()
            return Match(count(prompt))
        return Match(count(prompt), data, hidden, received.release)

    def _best(
        self, sources: list[_Source], prompt: bytes, wait: bool, deadline: float
    ) -> _Source | None:
        """Who has most of a prompt, None if nobody has any; those that are gone are left out."""
        asked: dict[concurrent.futures.Future[Any], tuple[_Source, _Asked]] = {}
        best: tuple[int, _Source | None] = (0, None)
        try:
            for source in list(sources):
                try:
                    question = _question(deadline, wait=wait, probe=True)
                    one = source.ask(question, prompt, deadline)
                    asked[one.want.future] = source, one
                except PeerLostError as error:
                    self._leave_out(source, sources, error)
            while asked and best[0] < count(prompt) and not (wait and best[1]):
                for future in _first(asked, deadline):
                    source, one = asked.pop(future)
                    try:
                        with source.open(one, deadline, "auto") as data:
                            found = words.hear(data, words.Found).tokens
                    except PeerLostError as error:
                        self._leave_out(source, sources, error)
                    else:
                        best = max(best, (found, source), key=lambda pair: pair[0])
        finally:
            for _, one in asked.values():
                one.want.cancel()
        return best[1]

    def _leave_out(self, source: _Source, sources: list[_Source], error: KVLinkError) -> None:
        """Go on with the others.

        Raises:
            PeerLostError: there is no other.
        """
        if source.lose():
            warnings.warn(
                f"{source.link.url} is gone, its prefixes are computed again until it is back: "
                f"{error}",
                RuntimeWarning,
                stacklevel=2,
            )
        sources.remove(source)
        if not sources:
            raise error


def _question(deadline: float, *, wait: bool, probe: bool = False) -> words.Question:
    left = max(0.0, deadline - time.monotonic())
    return words.Question(f"lookup/{uuid.uuid4().hex}", left, wait, probe)


def _first(
    asked: dict[concurrent.futures.Future[Any], tuple[_Source, _Asked]], deadline: float
) -> set[concurrent.futures.Future[Any]]:
    """The questions that were answered first."""
    left = max(0.0, deadline - time.monotonic())
    done, _ = concurrent.futures.wait(
        asked, timeout=left, return_when=concurrent.futures.FIRST_COMPLETED
    )
    if not done:
        silent = ", ".join(source.link.url for source, _ in asked.values())
        raise TransferTimeout(f"no answer from {silent}", phase="asked")
    return done
