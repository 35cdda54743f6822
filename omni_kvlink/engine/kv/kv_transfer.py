"""K and V of prompts, from a prefill stage to a decode stage."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING

import torch

from omni_kvlink import KVCacheTransferData, KVLink, KVMetadata
from omni_kvlink.adapters import PagedAdapter, PagedCache
from omni_kvlink.errors import (
    KVLinkError,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
    format_seconds,
)
from omni_kvlink.lookup import LookupConsumer, LookupProducer, PrefixStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_kvlink import KVConsumer
    from omni_kvlink.engine.config import KVTransferConfig
    from omni_kvlink.engine.kv.block_manager import KVPools

_CONNECT_SECONDS = 1.0  # of an attempt to connect; the next one follows, until the stage closes
_SAMPLE_VALUES = 64  # values of each weight that tell a model from another

_log = logging.getLogger(__name__)


class KVTransferProducer:
    """The end of a prefill stage: keeps K and V of prompts within its budget, and sends them.

    `model` names the weights; stages of another model are refused.
    """

    def __init__(self, config: KVTransferConfig, model: str):
        options = {**config.options, "quota": config.budget}
        self._store = PrefixStore(KVLink.serve(config.url, **options))
        self._producer = LookupProducer(self._store, model=model)
        self._peers = PeerConnections(config, self._producer.listen)

    def insert(
        self, token_ids: Sequence[int], pools: KVPools, block_ids: list[int], hidden: torch.Tensor
    ) -> None:
        """Copy K and V of a prompt out of its blocks; `hidden` [1, dim] is of its last token.

        Does not wait for a decode stage. CapacityError if it is larger than the budget.
        """
        form = {"kv_lens": [len(token_ids)], "ropes": [len(token_ids)]}
        cache = PagedCache(pools.keys, pools.values, pools.block_size, block_ids)
        layers = PagedAdapter().export(cache, request_id="prefix", metadata=form).layer_blocks
        keys, values = (
            [view for view in layers[part] if view is not None]
            for part in ("key_cache", "value_cache")
        )
        self._store.insert(list(token_ids), None, keys, values, hidden)

    def stats(self) -> dict[str, int]:
        """Return the statistics of the `LookupProducer`."""
        return self._producer.stats()

    def close(self) -> None:
        """Close the links; decode stages compute what they miss."""
        self._peers.close()
        self._producer.close()


class KVTransferConsumer:
    """The end of a decode stage: receives K and V of the beginning of a prompt into its blocks."""

    def __init__(self, config: KVTransferConfig, model: str):
        self._timeout = config.timeout
        link = KVLink.serve(config.url, **config.options)
        self._lookup = LookupConsumer(link, [], model=model, verify="full")
        self._peers = PeerConnections(config, self._lookup.add)
        self._counters: Counter[str] = Counter()

    def receive(
        self, token_ids: Sequence[int], pools: KVPools, block_ids: list[int], num_computed: int
    ) -> int:
        """Receive what is not in the blocks yet; returns how many first tokens are in them then.

        Blocks up to `timeout` seconds for an answer, and the first time for a connection. Without
        an answer nothing is received.
        SchemaError: a producer is of another model.
        """
        try:
            self._peers.wait(self._timeout)
            match = self._lookup.select(list(token_ids), timeout=self._timeout)
        except (TransferTimeout, PeerLostError, TransferFailed) as error:
            _log.warning("a prompt's beginning is computed here: %s", error)
            self._counters["failed"] += 1
            return num_computed
        with match:
            kind = "partial" if match.tokens else "missed"
            self._counters["complete" if match.is_complete else kind] += 1
            if match.data is None or match.tokens <= num_computed:
                return num_computed
            self._inject(match.data, pools, block_ids, num_computed)
            return match.tokens

    def stats(self) -> dict[str, int]:
        """Prompts found complete, partial, missed and failed; tokens received."""
        names = ("complete", "partial", "missed", "failed", "tokens")
        return {name: self._counters[name] for name in names}

    def close(self) -> None:
        """Close the links."""
        self._peers.close()
        self._lookup.close()

    def _inject(
        self, prefix: KVCacheTransferData, pools: KVPools, block_ids: list[int], start: int
    ) -> None:
        """Copy rows into blocks from `start` on: other requests may use the blocks before it."""
        stop, size = prefix.metadata.seq_len, pools.block_size
        metadata = KVMetadata((stop - start,), (stop - start,), prefix.metadata.num_layers)
        blocks = {
            part: [torch.as_tensor(view)[start:] for view in views]
            for part, views in prefix.layer_blocks.items()
        }
        data = KVCacheTransferData("prefix", dict(blocks), (), metadata)
        slots = [block_ids[i // size] * size + i % size for i in range(start, stop)]
        PagedAdapter().inject(data, pools.keys, pools.values, block_size=size, slot_mapping=slots)
        self._counters["tokens"] += stop - start


class PeerConnections:
    """Connects to the stages of the other role, which may start later, in a thread."""

    def __init__(self, config: KVTransferConfig, add: Callable[[KVConsumer], None]):
        self._config, self._add = config, add
        self._connected, self._is_closing = threading.Event(), threading.Event()
        self._count, self._has_waited = 0, False
        self._failures: dict[str, KVLinkError] = {}
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> None:
        """Wait for all the first time, then for none; TransferTimeout if no one is connected."""
        self._connected.wait(0.0 if self._has_waited else timeout)
        self._has_waited = True
        if not self._count:
            peers = "; ".join(
                f"{url}: {self._failures[url]}" if url in self._failures else url
                for url in self._config.peers
            )
            is_late = len(self._failures) < len(self._config.peers)  # else each one was refused
            within = f" within {format_seconds(timeout)}" if is_late else ""
            raise TransferTimeout(f"not connected to {peers}{within}", waited=timeout)

    def close(self) -> None:
        """Stop connecting."""
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        missing = deque(self._config.peers)
        while missing and not self._is_closing.is_set():
            url = missing.popleft()  # one that is absent keeps no other one waiting
            try:
                link = KVLink.connect(url, timeout=_CONNECT_SECONDS, **self._config.options)
            except (TransferTimeout, PeerLostError) as error:
                missing.append(url)
                if isinstance(error, PeerLostError):  # which came at once
                    self._is_closing.wait(_CONNECT_SECONDS)
            except KVLinkError as error:
                self._failures[url] = error
                _log.error("%s is not connected to: %s", url, error)
            else:
                self._add(link)
                self._count += 1
        self._connected.set()


def name_of_weights(modules: Mapping[str, torch.nn.Module]) -> str:
    """A name that two models share only if their weights begin alike, in one dtype."""
    digest = hashlib.sha256()
    for name, module in modules.items():
        for key, tensor in module.state_dict().items():
            digest.update(f"{name}.{key} {tensor.dtype} {list(tensor.shape)}".encode())
            sample = tensor.detach().flatten()[:_SAMPLE_VALUES].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
