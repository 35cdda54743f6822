"""Loads encoder outputs from their producers; the scheduler never waits."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch

from omni_kvlink import Payload, TensorTransferData
from omni_kvlink.errors import KVLinkError, SchemaError
from omni_kvlink.integrations.vllm.declining import Decliner
from omni_kvlink.integrations.vllm.identity import differences
from omni_kvlink.integrations.vllm.peers import Peers
from omni_kvlink.integrations.vllm.step import CancelledLoad
from omni_kvlink.lowlevel import BackgroundGet, begin_get, open_delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.integrations.vllm.params import Source
    from omni_kvlink.integrations.vllm.settings import EncoderSettings
    from omni_kvlink.lowlevel import Delivery

log = logging.getLogger(f"vllm.{__name__}")

THREADS = 4
"""Threads of each producer's loads: a producer that does not answer holds up its own only."""

UNUSED = "its reader does not need it any more"
"""The reason of an output that is aborted."""

OUTPUT = "output"
"""The name of the payload's tensor."""


@dataclasses.dataclass(frozen=True)
class ExpectedOutput:
    """The encoder output that a request needs."""

    item: str  # vLLM's identifier of the media item
    embeds: int  # rows
    adapter: str  # see `tower_adapter`

    def check(self, data: Payload, identity: Mapping[str, str], *, peer: str) -> torch.Tensor:
        """Return the encoder output in a payload, a view, if it is this one.

        Raises:
            SchemaError: it is another one, or this engine would have computed another one.
        """
        remote = data.metadata.get("identity") if isinstance(data, TensorTransferData) else None
        if not isinstance(data, TensorTransferData) or not isinstance(remote, Mapping):
            raise SchemaError(f"{peer} sent {data.request_id!r}, which is no encoder output")
        if wrong := differences({**identity, "adapter": self.adapter}, remote):
            raise SchemaError(f"the encoder of {peer} is not this engine's: {wrong}")
        if data.metadata.get("item") != self.item:
            raise SchemaError(
                f"{peer} sent the encoder output of item {data.metadata.get('item')!r:.200}; "
                f"expected that of {self.item!r:.200}"
            )
        output = data.tree.get(OUTPUT)
        if not isinstance(output, torch.Tensor) or output.dim() != 2 or len(output) != self.embeds:
            raise SchemaError(f"{peer} sent {data!r} for {self.embeds} embeddings")
        return output


class OutputLoad:
    """The load of one encoder output: a pool thread requests it, none waits, one copies it.

    `request_id` is the request whose read of the source it takes. When `is_done`, it has a
    `tensor` in memory of its own, or an `error`.
    """

    def __init__(
        self, loader: EncoderLoader, source: Source, expected: ExpectedOutput, request_id: str
    ):
        self.source, self.expected, self.request_id = source, expected, request_id
        self.tensor: torch.Tensor | None = None
        self.error = ""
        self._loader = loader
        self.get = BackgroundGet(
            source.key,
            partial(loader.peers.link, source.url),
            begin_get,
            loader.timeout,
            url=loader.url_of(source),
            submit=partial(loader.submit, source),
            copy=self._copy,
            fail=self.fail,
        )

    def is_done(self) -> bool:
        """Whether it has ended; does not block. Ends it if its deadline has passed."""
        if not (self.error or self.tensor is not None):
            self.get.expire()
        return bool(self.error) or self.tensor is not None

    def fail(self, error: Exception) -> None:
        """End the load without an output; one that was requested will not be loaded again."""
        if not isinstance(error, KVLinkError):
            log.error("encoder output %.200r", self.expected.item, exc_info=error)
        self.error = f"{type(error).__name__}: {error}"
        if self.get.is_requested:
            self._loader.decline(self.source, self.request_id)

    def _copy(self, delivery: Delivery) -> None:
        """Copy the output, which is there."""
        link, started = self.get.link, time.perf_counter()
        try:
            received = open_delivery(link, delivery, started=started)
            with received as data:
                output = self.expected.check(data, self._loader.identity, peer=link.url)
                tensor = torch.empty(output.shape, dtype=output.dtype)
                received.scatter([tensor])  # the same pass checks each byte against its digest
        except Exception as error:
            self.fail(error)
        else:
            self.tensor = tensor


class EncoderLoader:
    """The links of a consumer to its producers, and the threads that connect and copy."""

    def __init__(self, settings: EncoderSettings, identity: Mapping[str, str]):
        self.peers = Peers(settings.peers, settings.connect)
        self.identity, self.timeout = identity, settings.timeout
        self._default_url = settings.default_peer
        self._pools = {url: ThreadPoolExecutor(THREADS, "kvlink-ec") for url in settings.peers}
        self._decliners = {
            url: Decliner(self.peers, pool.submit, self.timeout)
            for url, pool in self._pools.items()
        }

    def load(
        self, source: Source, expected: ExpectedOutput, request_id: str, error: str = ""
    ) -> OutputLoad:
        """Begin a load, which ends within the settings' `timeout`; never raises.

        With an `error`, a reason not to attempt it, it has ended.
        """
        load, url = OutputLoad(self, source, expected, request_id), self.url_of(source)
        error = error or source.error
        if not error and url not in self._pools:
            peers = ", ".join(self._pools)
            error = f"url is {url!r:.200}, which is not one of this engine's peers: {peers}"
        if error:
            load.fail(SchemaError(error))
        else:
            self.submit(source, load.get.request)
        return load

    def decline(self, source: Source, request_id: str) -> None:
        """Take the read of a request that does not need its output; does not block."""
        url = self.url_of(source)
        if source.error or url not in self._pools:
            return
        if source.readers == 1:
            self.submit(source, partial(self._abort, source))
        else:
            read = CancelledLoad(request_id, source.key, source.url, source.readers, UNUSED)
            self._decliners[url].decline(read)

    def submit(self, source: Source, call: Callable[[], None]) -> None:
        """Run a call in a thread of the source's producer."""
        self._pools[self.url_of(source)].submit(call)

    def url_of(self, source: Source) -> str:
        """The URL of a source's producer."""
        return source.url or self._default_url

    def close(self) -> None:
        """End all loads with an error, and close the links."""
        for decliner in self._decliners.values():
            decliner.close()
        self.peers.close()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _abort(self, source: Source) -> None:
        try:
            link = self.peers.link(source.url, timeout=self.timeout)
            link.abort(source.key, UNUSED)
        except Exception as error:  # its producer is gone, or frees it when its ttl has passed
            log.debug("encoder output %.200r was not aborted: %s", source.key, error)
