"""Where a rank's KV comes from: one payload as it lies there, or several parts put together."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from omni_kvlink.connectors.base import Delivery, PendingGet
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.kv.kv_partition import WHOLE, KVPart, KVPartition
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.link import KVLink, Payload, Received, Verify
from omni_kvlink.payload.branch import Shard
from omni_kvlink.payload.bundle import BundleBranch, KVCacheBundle
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.topology import blank_heads, head_targets


class KVSource:
    """The links to the stage before, and what this rank gets over each.

    Args:
        asked: each part, and its sender's link.
        shard: the heads of this rank, which several parts make together.
    """

    def __init__(self, asked: Sequence[tuple[KVLink, KVPart]], shard: Shard):
        self._asked, self._shard = list(asked), shard

    @classmethod
    def whole(cls, link: KVLink) -> KVSource:
        """Every KV comes undivided, over this link."""
        return cls([(link, WHOLE)], Shard(0, 1, (0, 1)))

    @classmethod
    def connect(cls, config: KVConfig, division: KVPartition, place: RankCoords) -> KVSource:
        """Connect to those senders that have a part for this rank.

        Raises:
            TransferTimeout: one does not serve within `connect_timeout`.
            UnavailableError, VersionError, ConnectorError
        """
        shares = division.sent_to(place)
        deadline, links = time.monotonic() + config.connect_timeout, dict[int, KVLink]()
        try:
            for sender in {share.sender for share in shares}:
                left = max(0.0, deadline - time.monotonic())
                url = config.sources[sender]
                links[sender] = KVLink.connect(url, timeout=left, **config.source_options)
        except BaseException:
            for link in links.values():
                link.close()
            raise
        return cls(
            [(links[share.sender], share) for share in shares], division.receiver(place.tensor)
        )

    @property
    def is_divided(self) -> bool:
        """Whether a request's KV comes in several parts."""
        return len(self._asked) > 1

    def keys(self, request_id: str) -> list[str]:
        """What is asked for."""
        return [share.key(request_id) for _, share in self._asked]

    def begin_get(self, request_id: str, *, timeout: float) -> KVNeeds:
        """Ask for every part, without waiting; `timeout` bounds a reconnection only.

        Raises:
            PeerLostError: a producer is gone and did not come back in time.
        """
        wants: list[PendingGet] = []
        try:
            for link, share in self._asked:
                wants.append(link.begin_get(share.key(request_id), timeout=timeout))
        except BaseException:
            for want in wants:
                want.cancel()
            raise
        return KVNeeds(wants)

    def open(self, wants: KVNeeds, *, started: float, verify: Verify) -> ReceivedKV:
        """What came, checked; after an error nothing of it is held.

        Several parts are checked while they are put together: `ReceivedKV.placed_on`.

        Args:
            started: when the waiting began, on `time.perf_counter`'s clock.

        Raises:
            TransferFailed, PeerLostError: one of them did not come.
            IntegrityError, WireError: one is not what was sent.
        """
        deliveries, parts = wants.take(), list[Received]()
        how: Verify = "auto" if self.is_divided and verify == "full" else verify
        try:
            for (link, _), delivery in zip(self._asked, deliveries, strict=True):
                parts.append(link.open_delivery(delivery, started=started, verify=how))
        except BaseException:
            for part in parts:
                part.give_back()
            for delivery in deliveries[len(parts) + 1 :]:
                delivery.give_back()
            raise
        return ReceivedKV(parts, self._shard)

    def abort(self, request_id: str, reason: str) -> None:
        """No producer shall keep a part of it for this rank.

        Raises:
            ClosedError: the links are closed; they keep nothing.
        """
        for link, share in self._asked:
            link.abort(share.key(request_id), reason)

    def stats(self) -> dict[str, Any]:
        """Of each link, and how many payloads are awaited over all of them."""
        links = [link.stats() for link in self._links()]
        return {"waiting": sum(one["waiting"] for one in links), "links": links}

    def close(self) -> None:
        for link in self._links():
            link.close()

    def _links(self) -> list[KVLink]:
        return list({id(link): link for link, _ in self._asked}.values())


class KVNeeds:
    """Payloads that were asked for together.

    Attributes:
        future: ends when all have come, or one will not.
    """

    def __init__(self, wants: list[PendingGet]):
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # only an answer ends it
        self._wants, self._missing = wants, len(wants)
        self._lock = threading.Lock()
        for want in wants:
            want.future.add_done_callback(self._on_answer)

    def take(self) -> list[Delivery]:
        """What came, in the order in which it was asked for; `future` has ended.

        Raises:
            What one of them ended with; the others were given back.
        """
        wants, self._wants = self._wants, []
        order = sorted(range(len(wants)), key=lambda at: _outcome(wants[at]))
        found: dict[int, Delivery] = {}
        try:
            for at in order:
                found[at] = wants[at].wait(timeout=0.0)
        except BaseException:
            for delivery in found.values():
                delivery.give_back()
            for at in order[len(found) + 1 :]:  # the one that raised is over
                wants[at].cancel()
            raise
        return [found[at] for at in range(len(wants))]

    def cancel(self) -> None:
        """Ask for them no more; what came meanwhile goes back. Again does nothing."""
        wants, self._wants = self._wants, []
        for want in wants:
            want.cancel()

    def _on_answer(self, answer: Future[Any]) -> None:
        """In a thread of a connector, which must not wait."""
        with self._lock:
            self._missing -= 1
            is_over = not self.future.done() and (not self._missing or bool(answer.exception()))
        if is_over:
            self.future.set_result(None)


def _outcome(want: PendingGet) -> int:
    """Failed ones sort first: one of them is the error that all end with."""
    if not want.future.done():
        return 2
    return 0 if want.future.exception() is not None else 1


class ReceivedKV:
    """The parts of a request's KV that are all there."""

    def __init__(self, parts: list[Received], shard: Shard):
        self._parts, self._shard = parts, shard

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return sum(part.manifest.nbytes for part in self._parts)

    def placed_on(self, device: torch.device) -> Payload:
        """One part on the CPU as it lies in the link's memory; else a copy, every byte checked.

        Raises:
            IntegrityError: these are not the bytes that were sent.
            SchemaError: the parts are not of one cache, or some are missing.
        """
        if len(self._parts) == 1 and device.type == "cpu":
            return self._parts[0].data
        found = [part.data for part in self._parts]
        if len(found) == 1:
            target = _empty_like(found[0], device)
            places = [target]
        else:
            target = blank_heads(found[0], self._shard, device=device)
            places = head_targets(found, into=target)
        for part, place in zip(self._parts, places, strict=True):
            part.scatter(place)
        self.release()
        return target

    def release(self) -> None:
        """Give back what is still held; again does nothing."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.release()


def _empty_like(data: Payload, device: torch.device) -> Payload:
    if isinstance(data, KVCacheTransferData):
        return _empty_cache(data, device)
    branches: dict[str, BundleBranch] = {
        name: _empty_cache(branch, device) if isinstance(branch, KVCacheTransferData) else branch
        for name, branch in data.branches.items()
    }
    return KVCacheBundle(data.request_id, branches)


def _empty_cache(data: KVCacheTransferData, device: torch.device) -> KVCacheTransferData:
    blocks = {
        name: [
            None if layer is None else torch.empty(layer.shape, dtype=layer.dtype, device=device)
            for layer in layers
        ]
        for name, layers in data.layer_blocks.items()
    }
    return KVCacheTransferData(data.request_id, blocks, data.block_ids, data.metadata)
