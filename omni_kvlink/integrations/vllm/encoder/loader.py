"""Loads encoder outputs from their producers, in threads; the scheduler never waits."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch

from omni_kvlink.errors import KVLinkError
from omni_kvlink.integrations.vllm.encoder.identity import ExpectedOutput, check_output
from omni_kvlink.integrations.vllm.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_kvlink import KVConsumer
    from omni_kvlink.integrations.vllm.encoder.params import Source
    from omni_kvlink.integrations.vllm.encoder.settings import EncoderSettings

log = logging.getLogger(f"vllm.{__name__}")

THREADS = 4
"""Threads of each producer's loads: a producer that does not answer holds up its own only."""


class LoadedOutput(NamedTuple):
    """An encoder output in memory of its own, or why there is none."""

    tensor: torch.Tensor | None
    error: str = ""


class EncoderLoader:
    """The links of a consumer to its producers, and the threads that read from them."""

    def __init__(self, settings: EncoderSettings, identity: Mapping[str, str]):
        self._peers = Peers(settings.peers, settings.connect)
        self._pools = {url: ThreadPoolExecutor(THREADS, "kvlink-ec") for url in settings.peers}
        self._first, self._identity = settings.peers[0], identity
        self._timeout = settings.timeout

    def load(self, source: Source, expected: ExpectedOutput) -> Future[LoadedOutput]:
        """Begin a load, which ends within the settings' `timeout`; never raises, nor its future."""
        pool = self._pools.get(source.url or self._first)
        error = source.error
        if pool is None:
            known = ", ".join(self._pools)
            error = error or f"url {source.url!r:.200} is not one of this engine's peers: {known}"
        if pool is None or error:
            failed: Future[LoadedOutput] = Future()
            failed.set_result(LoadedOutput(None, error))
            return failed
        return pool.submit(self._load, source, expected, time.monotonic() + self._timeout)

    def abort(self, source: Source, reason: str) -> None:
        """Free an output at its producer, which has no other reader; does not block."""
        pool = self._pools.get(source.url or self._first)
        if pool is not None:
            pool.submit(self._abort, source, reason)

    def close(self) -> None:
        """End all loads with an error, and close the links."""
        self._peers.close()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _load(self, source: Source, expected: ExpectedOutput, deadline: float) -> LoadedOutput:
        try:
            link = self._peers.link(source.url, timeout=_left(deadline))
            return LoadedOutput(self._receive(link, source.key, expected, deadline))
        except Exception as error:
            if not isinstance(error, KVLinkError):
                log.exception("encoder output %.200r", expected.item)
            return LoadedOutput(None, f"{type(error).__name__}: {error}")

    def _receive(
        self, link: KVConsumer, key: str, expected: ExpectedOutput, deadline: float
    ) -> torch.Tensor:
        received = link.get(key, timeout=_left(deadline))
        try:
            found = check_output(received.data, expected, self._identity, peer=link.url)
            tensor = torch.empty(found.shape, dtype=found.dtype)
            received.scatter([tensor])  # the same pass checks each byte against its digest
            return tensor
        finally:
            received.release()

    def _abort(self, source: Source, reason: str) -> None:
        try:
            self._peers.link(source.url, timeout=self._timeout).abort(source.key, reason)
        except Exception as error:  # its producer is gone, or frees it when its ttl has passed
            log.debug("encoder output %.200r was not aborted: %s", source.key, error)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
