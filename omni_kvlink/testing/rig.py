"""What a conformance check works with: a producer in this process, and readers of a peer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from omni_kvlink.link import KVConsumer, KVLink, KVProducer
from omni_kvlink.testing.peer_harness import PATIENCE, Peer, RemoteLink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SLACK = 0.25
"""Seconds by which no call may outlive its deadline, and in which every wake-up must come."""

Raised = TypeVar("Raised", bound=BaseException)


class CheckFailed(AssertionError):
    """A behaviour is missing.

    Attributes:
        check: the name of the function that checks it.
    """

    def __init__(self, check: str, why: str):
        super().__init__(f"{check}: {why}")
        self.check = check


def run_checked(check: Callable[..., None], *arguments: Any) -> None:
    """Call a check.

    Raises:
        CheckFailed: the check raised an error.
    """
    try:
        check(*arguments)
    except Exception as error:
        name = getattr(check, "__name__", repr(check))
        raise CheckFailed(name, str(error) or repr(error)) from error


class Rig:
    """The set-up of one check: links of one URL, which `close` closes.

    Args:
        make_url: returns a fresh URL at each call.
        options: of every link, such as `{"mode": "sealed"}`.
        peer: where the readers are; it has the commands of `LinkCommands`.
    """

    def __init__(self, make_url: Callable[[], str], options: Mapping[str, Any], peer: Peer):
        self.url = make_url()
        self._options = {"quota": 8 << 20, **options}
        self._peer = peer
        self._links: list[KVProducer | KVConsumer] = []
        self._remotes: list[RemoteLink] = []

    def serve(self, **options: Any) -> KVProducer:
        """Make a producer in this process."""
        link = KVLink.serve(self.url, **{**self._options, **options})
        self._links.append(link)
        return link

    def connect(self, *, timeout: float = PATIENCE, **options: Any) -> RemoteLink:
        """Make a reader of the peer, and wait until it is connected."""
        remote = self.begin_connect()
        remote.call("connect", url=self.url, timeout=timeout, **{**self._options, **options})
        return remote

    def begin_connect(self) -> RemoteLink:
        """Name a reader of the peer, which is not connected yet."""
        remote = RemoteLink(self._peer, f"{self.url}#{len(self._remotes)}")
        self._remotes.append(remote)
        return remote

    def connect_here(self, *, timeout: float = PATIENCE) -> KVConsumer:
        """Make a reader in this process, for a check that needs its objects."""
        link = KVLink.connect(self.url, timeout=timeout, **self._options)
        self._links.append(link)
        return link

    @property
    def options(self) -> dict[str, Any]:
        """The options of every link."""
        return dict(self._options)

    def close(self) -> None:
        """Close every link."""
        for remote in self._remotes:
            remote.call("remove")
        for link in self._links:
            link.close()
        self._links.clear()


def until(condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
    """Wait for something that no event announces, by looking every 2 ms.

    Raises:
        AssertionError: it has not come after `timeout` seconds; the text has `what`.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout:g} s still not: {what}")
        time.sleep(0.002)


def until_disconnected(reader: RemoteLink) -> None:
    """Wait until a reader has noticed that its producer is closed."""
    until(lambda: not reader.call("stats")["connected"], "the reader noticed")


def until_requested(producer: KVProducer, readers: int) -> None:
    """Wait until so many readers wait for a payload, or have its offer already."""

    def is_requested() -> bool:
        transfers = producer.stats()["transfers"]
        return bool(transfers["waiting"] + transfers["leased"] == readers)

    until(is_requested, "every request arrived")


def until_freed(producer: KVProducer, timeout: float = PATIENCE) -> None:
    """Wait until no byte of the producer's memory is in use."""

    def is_free() -> bool:
        used: int = producer.stats()["memory"]["used"]
        return used == 0

    try:
        until(is_free, "no memory used", timeout)
    except AssertionError as error:
        raise AssertionError(f"{error}: {producer.stats()}") from None


def expect(
    kind: type[Raised],
    call: Callable[[], Any],
    *,
    within: float = PATIENCE,
    mentions: tuple[str, ...] = (),
) -> Raised:
    """Call `call`, which must raise `kind`, and return that error.

    Args:
        kind: the error's exact type; a subclass is wrong.
        call: what must fail.
        within: seconds in which it must fail.
        mentions: what the error's text must contain.

    Raises:
        AssertionError: the call returned, or its error is another one or late.
    """
    started = time.monotonic()
    try:
        result = call()
    except kind as error:
        seconds = time.monotonic() - started
        if type(error) is not kind:
            raise AssertionError(f"wanted {kind.__name__}, got {error!r}") from error
        if seconds > within:
            raise AssertionError(
                f"{kind.__name__} came after {seconds:.3f} s, not {within:.3f}"
            ) from error
        for text in mentions:
            if text not in str(error):
                raise AssertionError(f"{text!r} is missing in: {error}") from error
        error.__traceback__ = None
        return error
    except Exception as error:
        raise AssertionError(f"wanted {kind.__name__}, got {error!r}") from error
    raise AssertionError(f"wanted {kind.__name__}, got the result {result!r}")
