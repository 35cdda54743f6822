"""`ChunkTransfers`: copies between vLLM's primary tier and kept payloads, one for each chunk."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy
import torch
from vllm.v1.kv_offload.tiering.base import JobResult

from omni_kvlink import ReceivedBatch
from omni_kvlink.errors import KVLinkError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from omni_kvlink.kept import StoreClient

log = logging.getLogger(f"vllm.{__name__}")

BATCH = 64 << 20
"""Bytes of chunks that are got at once, so that a link need not hold a whole prompt."""

_CHUNK = "chunk"
"""The name of a payload's tensor."""


class ChunkTransfers:
    """The transfers of one engine; its methods block, and are called in threads.

    Args:
        client: what keeps chunks, and finds those of others; closed by `close`.
        primary: vLLM's primary tier, bytes `[chunks, bytes of a chunk]`, mapped until `close`.
        drain: seconds for which `close` waits until the stores have what was kept here.
    """

    def __init__(self, client: StoreClient, primary: memoryview, *, drain: float):
        self._client, self._drain = client, drain
        self._rows = torch.from_numpy(numpy.asarray(primary))
        self._warned: set[tuple[str, type[KVLinkError]]] = set()

    def contains(self, keys: Iterable[OffloadKey]) -> list[bool]:
        """Whether each chunk is kept here, in a store or by a peer."""
        return self._client.contains([key.hex() for key in keys])

    def store(self, job: TransferJob) -> JobResult:
        """Keep the chunks of a job, those that are not yet kept; fails if one cannot be."""
        started = time.monotonic()
        stored = [key for key, row in self._chunks(job) if self._store(key, row)]
        return self._result(job, started, stored)

    def load(self, job: TransferJob) -> JobResult:
        """Load the chunks of a job into their rows; the result names those that are there.

        Each byte is compared with its digest while it is copied. The row of a chunk that is
        missing or wrong is worthless.
        """
        started = time.monotonic()
        chunks = list(self._chunks(job))
        size = max(1, BATCH // self._rows.shape[1])
        loaded: list[OffloadKey] = []
        for first in range(0, len(chunks), size):
            loaded += self._load(chunks[first : first + size])
        return self._result(job, started, loaded)

    def close(self) -> None:
        """Close the links, and drop the primary tier, which vLLM then unmaps."""
        self._client.close(drain=self._drain)
        self._rows = torch.empty(0, 0)

    def _store(self, key: OffloadKey, row: torch.Tensor) -> bool:
        """Keep a chunk, unless it is kept; whether it is."""
        try:
            self._client.put(key.hex(), {_CHUNK: row}, timeout=0)  # wait for no reader's memory
        except KVLinkError as error:
            self._warn("stored", error)
            return False
        return True

    def _load(self, chunks: Collection[tuple[OffloadKey, torch.Tensor]]) -> list[OffloadKey]:
        """Load these chunks, which are got at once; the keys of those that are there."""
        loaded = []
        results = self._client.get_many([key.hex() for key, _ in chunks])
        pairs = [pair for pair in zip(results, chunks, strict=True) if pair[0] is not None]
        with (batch := ReceivedBatch([received for received, _ in pairs if received is not None])):
            errors = batch.scatter_each([{_CHUNK: row} for _, (_, row) in pairs])
        for error, (_, (key, _)) in zip(errors, pairs, strict=True):
            if error is None:
                loaded.append(key)
            else:
                self._warn("loaded", error)
        return loaded

    def _chunks(self, job: TransferJob) -> Iterator[tuple[OffloadKey, torch.Tensor]]:
        """The key and the row of each chunk of a job."""
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            yield key, self._rows[int(chunk)]

    def _result(self, job: TransferJob, started: float, done: Collection[OffloadKey]) -> JobResult:
        return JobResult(
            job.job_id,
            success=len(done) == len(job.keys),
            successful_keys=tuple(done),
            transfer_time=time.monotonic() - started,
            transfer_bytes=len(done) * self._rows.shape[1],
        )

    def _warn(self, verb: str, error: KVLinkError) -> None:
        """Log that a chunk could not be stored or loaded, the first time of each kind of error."""
        kind = verb, type(error)
        if kind not in self._warned:
            log.warning("a chunk was not %s: %s; the metrics count those that follow", verb, error)
        self._warned.add(kind)
