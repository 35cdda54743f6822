"""`StoreClient`: keeps payloads for others, and reads what others keep."""

from __future__ import annotations

import copy
import threading
import uuid
import warnings
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import ClosedError, DuplicateKeyError, SchemaError
from omni_kvlink.kept.batch_read import HERE, BatchRead
from omni_kvlink.kept.kept_receipts import KeptReceipts
from omni_kvlink.kept.local_source import LocalSource
from omni_kvlink.kept.offers import OfferSender
from omni_kvlink.kept.source import REASONS, KeptSource
from omni_kvlink.kept.store_messages import RESERVED, Attachment, advertised
from omni_kvlink.link import KVLink, check_timeout
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.schema import KVCacheTransferData, check_request_id
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.settings import Size, Texts
from omni_kvlink.system import process
from omni_kvlink.system.threads import uninterrupted
from omni_kvlink.system.waits import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from omni_kvlink.kept.identity import CacheIdentity
    from omni_kvlink.link import KVProducer, Payload, Received


class StoreClient:
    """Keeps payloads in this process, and shares them with stores and with other processes.

    `put` copies a payload into the memory of the link that this process serves. Each store fetches
    it from there, in the background, and keeps it beyond the end of this process. `get_many` looks
    here first, then in the stores, then at the peers, with one message for each of them. Over
    shared memory its views are the keeper's own memory; over a network each byte was checked.

    A store or peer that is not there, or does not answer in time, is a miss, which `stats` counts.
    A thread connects to it again. Thread-safe; a context manager.

    Args:
        serve: the URL that this process serves; peers, and stores, connect to it.
        stores: URLs of `kvlink store` processes, which take what is put here.
        peers: URLs that other clients serve; this one's own may be among them.
        identity: what decides the bytes; a part of every key. None if the keys say it all.
        budget: bytes of memory for payloads, or a text such as "8GB": the least recently used ones
            that nobody reads are evicted from it.
        timeout: seconds in which each store or peer answers; one that does not is left alone for
            five seconds.
        options: of all links, as of `KVLink.serve`. What differs between them, such as `peers` of
            encrypted ones, stands in their URLs.

    Raises:
        BusyError, SchemaError, UnavailableError: as `KVLink.serve`.
    """

    def __init__(
        self,
        serve: str,
        *,
        stores: Sequence[str] = (),
        peers: Sequence[str] = (),
        identity: CacheIdentity | None = None,
        budget: int | str = "4GiB",
        timeout: float = 2.0,
        **options: Any,
    ):
        self._identity, self._timeout = identity, check_timeout(timeout)
        own_options = {**options, "quota": Size(least=1).read(budget, "budget")}
        urls = Texts().read(stores, "stores"), Texts().read(peers, "peers")
        self._closed, self._process = False, process.current
        self._kept, self._counting = KeptReceipts(), threading.Lock()
        self._hits = Counter(dict.fromkeys((HERE, "stores", "peers"), 0))
        self._misses = Counter[str](dict.fromkeys(REASONS, 0))
        self._puts, self._duplicates = 0, 0
        self._offers: list[OfferSender] = []
        self._sources: list[tuple[str, KeptSource]] = []
        self._link: KVProducer = KVLink.serve(serve, **own_options)
        self._own = LocalSource(self._link, self._kept)
        try:
            self._open(urls, options)
        except BaseException:
            self.close()
            raise
        process.close_in_children(self)

    def _open(self, urls: tuple[Sequence[str], Sequence[str]], options: dict[str, Any]) -> None:
        """Open the stores and the peers."""
        for url in urls[0]:
            writer = Attachment(uuid.uuid4().hex, advertised(self.url))
            offers = OfferSender(self._link, writer, self._kept)
            self._offers.append(offers)
            refused = partial(_warn_of_refusal, url)
            source = KeptSource(url, writer.key, options, offers.add_all, refused)
            self._sources.append(("stores", source))
        for url in urls[1]:
            if advertised(url) != advertised(self.url):
                presence = f"{RESERVED}presence/{uuid.uuid4().hex}"
                self._sources.append(("peers", KeptSource(url, presence, options)))

    @property
    def url(self) -> str:
        """The URL that this process serves."""
        return self._link.url

    def key(self, name: str) -> str:
        """The request id under which links have what is named so here: it has the identity."""
        return check_request_id(name) if self._identity is None else self._identity.key(name)

    def put(
        self,
        key: str,
        tensors: Mapping[str, torch.Tensor] | Payload,
        metadata: Mapping[str, Any] | None = None,
        *,
        timeout: float = 10.0,
    ) -> bool:
        """Keep a payload, and offer it to the stores; False if one of this key is kept here.

        Returns when the tensors were copied; they may be modified again. `tensors` are tensors by
        name, with `metadata`, or a payload, of which `key` replaces the request id. `timeout` is
        that of `KVProducer.put`.

        Raises:
            CapacityError: it is larger than the budget, or readers have too much of it.
            TransferTimeout, SchemaError: as `KVProducer.put`.
        """
        self._check_open()
        name = self.key(key)
        if name in self._kept:
            self._duplicates += 1
            return False
        data = _payload(name, tensors, metadata)
        try:
            receipt = self._link.put(data, readers=None, timeout=timeout, digests=True)
        except DuplicateKeyError:  # another thread was faster
            self._duplicates += 1
            return False
        self._kept.add(receipt)
        self._puts += 1
        for offers in self._offers:
            offers.add(name)
        return True

    def contains(self, keys: Iterable[str]) -> list[bool]:
        """Whether each key is kept here, by a store or by a peer; one that is gone has none.

        It may be evicted before it is got. Blocks for the answers, one source after the other.
        """
        self._check_open()
        names = [self.key(key) for key in keys]
        found = self._own.contains(names)
        for _, source in self._sources:
            missing = [number for number, is_here in enumerate(found) if not is_here]
            keys_left = [names[number] for number in missing]
            answers = source.contains(keys_left, timeout=self._timeout)
            for number, is_there in zip(missing, answers, strict=True):
                found[number] = is_there
        return found

    def get_many(self, keys: Iterable[str]) -> list[Received | None]:
        """Read payloads: each is one that the caller uses and releases, or None for a miss.

        Blocks for the answers, one source after the other, and over a network for the bytes.
        `Received.scatter` copies one out, each byte checked; its IntegrityError is a miss, too.
        """
        self._check_open()
        batch = BatchRead([self.key(key) for key in keys])
        try:
            batch.read_from(HERE, self._own, timeout=self._timeout)
            for kind, source in self._sources:
                batch.read_from(kind, source, timeout=self._timeout)
        except BaseException:
            batch.release_unread()
            raise
        with self._counting:
            self._hits.update(batch.hits)
            self._misses.update(batch.misses())
        return batch.received

    def withdraw(self, key: str) -> bool:
        """Keep a payload no more, here and in the stores; whether it was kept here.

        Readers that have it keep what they have. The stores follow in the background.
        """
        self._check_open()
        name = self.key(key)
        self._kept.discard(name)
        was_kept = self._link.withdraw(name)
        for offers in self._offers:
            offers.add(name, is_kept=False)
        return was_kept

    def wait_connected(self, *, timeout: float) -> bool:
        """Wait until each store and peer has been there once; False if one has not in `timeout` s.

        An engine need not: what it asks for before is a miss.
        """
        self._check_open()
        deadline = Deadline(timeout)
        return all(
            source.was_connected.wait(deadline.seconds_left()) for _, source in self._sources
        )

    def drain(self, *, timeout: float) -> bool:
        """Wait until each store has taken what was put here; False if one has not in `timeout` s.

        A store that took it may have counted a payload as lost: one that was evicted here before,
        or one that is larger than the store.
        """
        self._check_open()
        deadline = Deadline(timeout)
        return all(offers.drain(deadline.seconds_left()) for offers in self._offers)

    def stats(self) -> dict[str, Any]:
        """Hits by the kind of source, misses by their reason, and the state of each source."""
        self._process.check("this StoreClient")
        with self._counting:
            counted = {"hits": {**self._hits}, "misses": {**self._misses}}
        return {
            **counted,
            "puts": self._puts,
            "duplicates": self._duplicates,
            "sources": [{"kind": kind, **source.stats()} for kind, source in self._sources],
            "offers": [offers.stats() for offers in self._offers],
            "link": self._link.stats(),
        }

    def close(self, *, drain: float = 0.0) -> None:
        """Close all links: what is kept here is lost to those who have not fetched it.

        With `drain`, wait so many seconds at most for the stores to fetch it. A second call does
        nothing.
        """
        if self._closed:  # also in a forked child
            return
        if drain:
            self.drain(timeout=drain)
        self._closed = True
        uninterrupted(self._close)

    def _close(self) -> None:
        for _, source in self._sources:
            source.close()
        self._link.close()
        for offers in self._offers:
            offers.stop()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StoreClient at {self.url}: {len(self._sources)} stores and peers>"

    def _check_open(self) -> None:
        self._process.check("this StoreClient")
        if self._closed:
            raise ClosedError("this StoreClient is closed")


def _payload(
    key: str, tensors: Mapping[str, torch.Tensor] | Payload, metadata: Mapping[str, Any] | None
) -> Payload:
    """A payload of this key; the caller's own is not modified."""
    if isinstance(tensors, (KVCacheTransferData, KVCacheBundle, TensorTransferData)):
        if metadata is not None:
            raise SchemaError("metadata= is for tensors by name: a payload has its own")
        data = copy.copy(tensors)
        data.request_id = key
        return data
    return TensorTransferData(key, tensors, metadata)


def _warn_of_refusal(url: str, reason: str) -> None:
    text = f"{url} does not fetch what is put here: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
