"""The set-up of a conformance check: a producer in this process, and readers of a peer."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

from omni_kvlink.errors import without_frames
from omni_kvlink.link import KVConsumer, KVLink, KVProducer
from omni_kvlink.testing.caches import fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE, Peer, RemoteLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import Payload

Raised = TypeVar("Raised", bound=BaseException)


class CheckFailed(AssertionError):
    """A behaviour is missing; `check` is the name of the function that checks it."""

    def __init__(self, check: str, why: str):
        super().__init__(f"{check}: {why}")
        self.check = check


@contextlib.contextmanager
def naming(check: Callable[..., None]) -> Iterator[None]:
    """Raise any error of the block as `CheckFailed` with the name of its check."""
    try:
        yield
    except Exception as error:
        name = getattr(check, "__name__", repr(check))
        raise CheckFailed(name, str(error) or repr(error)) from error


class Rig:
    """The set-up of one check: links of one URL, which `close` closes.

    `options` are of every link; `peer` has the commands of `LinkCommands` and runs the readers.
    """

    def __init__(self, make_url: Callable[[], str], options: Mapping[str, Any], peer: Peer):
        self.url = make_url()
        self.options = {"quota": 8 << 20, **options}
        self._peer = peer
        self._links: list[KVProducer | KVConsumer] = []
        self._remotes: list[RemoteLink] = []

    def serve(self, **options: Any) -> KVProducer:
        """Make a producer in this process."""
        link = KVLink.serve(self.url, **{**self.options, **options})
        self._links.append(link)
        return link

    def connect(self, *, timeout: float = PATIENCE, **options: Any) -> RemoteLink:
        """Make a reader of the peer, and wait until it is connected."""
        remote = self.begin_connect()
        remote.call("connect", url=self.url, timeout=timeout, **{**self.options, **options})
        return remote

    def begin_connect(self) -> RemoteLink:
        """Name a reader of the peer, which is not connected yet."""
        remote = RemoteLink(self._peer, f"{self.url}#{len(self._remotes)}")
        self._remotes.append(remote)
        return remote

    def connect_here(self, *, timeout: float = PATIENCE) -> KVConsumer:
        """Make a reader in this process, for a check that needs its objects."""
        link = KVLink.connect(self.url, timeout=timeout, **self.options)
        self._links.append(link)
        return link

    def until_freed(self) -> None:
        """Release what the peer keeps; wait until every open producer's memory is free."""
        self._peer.call("release_all")
        for link in self._links:
            if isinstance(link, KVProducer) and not link.stats()["closed"]:
                until_freed(link)

    def close(self) -> None:
        """Close every link."""
        for remote in self._remotes:
            remote.call("remove")
        for link in self._links:
            link.close()
        self._links.clear()


def until(condition: Callable[[], bool], goal: str, timeout: float = PATIENCE) -> None:
    """Wait at most `timeout` seconds for something that no event announces; look every 2 ms."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout:g} s still not: {goal}")
        time.sleep(0.002)


def until_disconnected(reader: RemoteLink) -> None:
    """Wait until a reader has noticed that its producer is closed."""
    until(lambda: not reader.call("stats")["connected"], "the reader noticed")


def until_requested(producer: KVProducer, readers: int) -> None:
    """Wait until so many readers wait for a payload, or have its offer already."""

    def requested() -> Any:
        transfers = producer.stats()["transfers"]
        return transfers["waiting"] + transfers["leased"]

    until(lambda: requested() == readers, "every request arrived")


def until_freed(producer: KVProducer, timeout: float = PATIENCE) -> None:
    """Wait until no byte of the producer's memory is in use."""
    try:
        until(lambda: not producer.stats()["memory"]["used"], "no memory used", timeout)
    except AssertionError as error:
        raise AssertionError(f"{error}: {producer.stats()}") from None


def request(
    reader: RemoteLink,
    producer: KVProducer,
    key: str,
    *,
    requests: int = 1,
    command: str = "get",
    **options: Any,
) -> Future[Any]:
    """Let a reader request a payload; returns when so many requests have reached the producer."""
    future = reader.submit(command, key=key, timeout=PATIENCE, **options)
    until_requested(producer, requests)
    return future


def aborts(producer: KVProducer, reader: RemoteLink) -> tuple[Callable[[str, str], Any], ...]:
    """The aborts of either side: functions of a key and a reason."""
    return producer.abort, lambda key, reason: reader.call("abort", key=key, reason=reason)


def hold(reader: RemoteLink, key: str) -> str:
    """Let a reader get a payload and keep its tensors; their hash."""
    reader.call("hold", key=key, timeout=60)
    return str(reader.peer.call("hash_held", key=key))


def wait_all(receipts: Iterable[Receipt]) -> None:
    """Wait until each was delivered."""
    for receipt in receipts:
        receipt.wait(timeout=60)


def receive(
    reader: RemoteLink | KVConsumer, receipt: Receipt, data: Payload, **options: Any
) -> None:
    """Let a reader get a payload that was put: it equals `data`, and its receipt is done."""
    if isinstance(reader, RemoteLink):
        digest = reader.call("get", key=data.request_id, timeout=60, **options)
    else:
        with reader.get(data.request_id, timeout=60, **options) as payload:
            digest = fingerprint(payload)
        del payload
    assert digest == fingerprint(data), f"{data.request_id!r} arrived with other content"
    receipt.wait(timeout=60)


def deliver(
    producer: KVProducer,
    reader: RemoteLink | KVConsumer,
    data: Payload,
    expected: Payload | None = None,
    *,
    verify: str = "auto",
    copies: int | None = None,
    **options: Any,
) -> None:
    """Put a payload with the options of `put`, and let a reader `receive` it as `expected`.

    `copies` is how often the producer must have copied it.
    """
    receipt = producer.put(data, **options)
    receive(reader, receipt, data if expected is None else expected, verify=verify)
    assert copies in (None, receipt.ledger.copies), receipt.ledger
    assert options.get("digests") in (None, receipt.ledger.digests != "off"), receipt.ledger


def expect(
    kind: type[Raised],
    call: Callable[..., Any],
    *arguments: Any,
    mentions: tuple[str, ...] = (),
    **options: Any,
) -> Raised:
    """Call `call` with the other arguments: it must raise exactly `kind`, which is returned.

    The error's text must contain all of `mentions`.
    """
    try:
        result = call(*arguments, **options)
    except kind as error:
        if type(error) is not kind:
            raise AssertionError(f"wanted {kind.__name__}, got {error!r}") from error
        for text in mentions:
            if text not in str(error):
                raise AssertionError(f"{text!r} is missing in: {error}") from error
        return without_frames(error)
    except Exception as error:
        raise AssertionError(f"wanted {kind.__name__}, got {error!r}") from error
    raise AssertionError(f"wanted {kind.__name__}, got the result {result!r}")
