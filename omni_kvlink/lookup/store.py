"""`PrefixStore`: K and V of many prompts within a budget, found by their longest common prefix."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.copier import TorchCopier
from omni_kvlink.errors import (
    CapacityError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
    format_seconds,
)
from omni_kvlink.link import check_timeout
from omni_kvlink.lookup.match import Match
from omni_kvlink.lookup.tokens import PrefixIndex, TokenIds, count, encode
from omni_kvlink.payload.kv_checks import check_reason
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata
from omni_kvlink.settings import Flag
from omni_kvlink.system.waits import LazyEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_kvlink.lookup.tokens import Namespace
    from omni_kvlink.payload.views import TensorView

MAX_FAILURES = 4096


@dataclasses.dataclass(eq=False)
class _Entry:
    """One prompt's K and V; `hidden` belongs to its last tokens."""

    key: bytes
    data: KVCacheTransferData
    hidden: torch.Tensor | None
    nbytes: int
    # One element a match that is on lease, which a finalizer takes without a lock.
    pins: deque[None] = dataclasses.field(default_factory=deque)

    def hidden_of(self, tokens: int) -> torch.Tensor | None:
        """The hidden state `[1, dim]` of the last of the first `tokens` tokens, if it is here."""
        row = -1 if self.hidden is None else tokens - 1 - count(self.key) + len(self.hidden)
        return None if self.hidden is None or row < 0 else self.hidden[row : row + 1]


class PrefixStore:
    """A buffer of K and V by token prefix, of `budget` bytes with hidden states; thread-safe.

    The least recently used prompts are evicted for new ones, except those on lease. The position of
    a token is its index. Prompts match inside one namespace only.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self._lock = threading.RLock()
        self._index = PrefixIndex()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._failures: OrderedDict[bytes, str] = OrderedDict()
        self._watchers: list[Callable[[], None]] = []
        self._used = 0
        self._counters: Counter[str] = Counter()

    def __repr__(self) -> str:
        used, prompts = self._used, len(self._entries)
        return f"<PrefixStore: {prompts} prompts, {used} of {self.budget} bytes>"

    def insert(
        self,
        tokens: TokenIds,
        roi: torch.Tensor | None,
        keys: Sequence[TensorView],
        values: Sequence[TensorView],
        hidden: torch.Tensor | None = None,
        *,
        namespace: Namespace = "",
        extra: Mapping[str, Any] | None = None,
        copy: bool = True,
    ) -> None:
        """Store the K and V of a prompt, and wake the calls that wait for it.

        If the store holds a prompt that begins with it, that one is kept, and counts as used.

        Args:
            tokens: ids of the prompt.
            roi: bool `[tokens]`, which of them are stored: the first ones; None for all.
            keys: `[tokens, kv_heads, head_dim]` of each layer, for the tokens that roi marks.
            values: the same of V.
            hidden: `[n, dim]`, the last hidden states of the last n tokens; with it, the forward
                pass of the same prompt can be left out.
            namespace: text, bytes or a mapping of JSON values that names what K and V depend on
                besides the tokens, such as an adapter, a salt or media.
            extra: travels with the match's metadata, as JSON values.
            copy: False if these tensors are not written to any more; the store then keeps them.

        Raises:
            SchemaError: the tensors do not fit the tokens, or what the store holds already; or the
                namespace is none.
            CapacityError: not enough memory beside the prompts on lease.
        """
        key = encode(tokens, roi, namespace)
        blocks = {"key_cache": list(keys), "value_cache": list(values)}
        metadata = _metadata(count(key), len(blocks["key_cache"]), extra)
        data = KVCacheTransferData("prefix", blocks, (), metadata)
        if hidden is not None and (hidden.dim() != 2 or not 1 <= len(hidden) <= count(key)):
            raise SchemaError(f"hidden: {list(hidden.shape)}; wanted [1…{count(key)}, dim]")
        nbytes = sum(view.nbytes for view in data.tensors())
        nbytes += 0 if hidden is None else hidden.nbytes
        with self._lock:
            self._check_alike(data)
            if not self._has(key, hidden):
                self._evict_for(nbytes)
                if copy:
                    copies = {name: list(map(_copy, views)) for name, views in blocks.items()}
                    data = KVCacheTransferData("prefix", copies, (), data.metadata)
                    hidden = None if hidden is None else hidden.clone()
                # Other threads read them, whose CUDA streams do not wait for this one's.
                added = [*data.tensors(), *([] if hidden is None else [hidden])]
                TorchCopier().record(added).wait()
                self._add(_Entry(key, data, hidden, nbytes))
            self._failures.pop(key, None)
        self._call_watchers()

    def select(
        self,
        tokens: TokenIds,
        roi: torch.Tensor | None = None,
        *,
        namespace: Namespace = "",
        wait: bool = False,
        timeout: float = 0.0,
    ) -> Match:
        """The longest prefix in the store of the tokens that `roi` marks; maybe an empty match.

        With `wait`, it blocks up to `timeout` seconds until the K and V of all of them are here:
        decode before prefill. The other arguments are as for `insert`. TransferFailed if `fail` was
        called for this prompt, TransferTimeout if not all tokens were inserted in time.
        """
        deadline = time.monotonic() + check_timeout(timeout)
        Flag().read(wait, "wait")
        key, changed = encode(tokens, roi, namespace), LazyEvent()
        if not wait:
            return self.lease(key)
        try:
            self.watch(changed.set)
            while True:
                changed.clear()
                with self._lock:
                    if self.covers(key):
                        return self.lease(key)
                if not changed.wait(deadline - time.monotonic()):
                    here, limit = self._index.longest(key)[0], format_seconds(timeout)
                    text = f"K and V of these {count(key)} tokens were not inserted within {limit}"
                    raise TransferTimeout(
                        f"{text}; {here} of them are here", waited=timeout, phase="never announced"
                    )
        finally:
            self.unwatch(changed.set)

    def fail(self, tokens: TokenIds, reason: str, *, namespace: Namespace = "") -> None:
        """Make every `select` that waits for this prompt, now or later, raise TransferFailed."""
        key = encode(tokens, None, namespace)
        check_reason(reason)
        with self._lock:
            self._failures[key] = reason
            if len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)
        self._call_watchers()

    def longest(self, key: bytes) -> int:
        """`tokens` of the match that an encoded prompt would have; changes nothing."""
        with self._lock:
            return self._find(key)[0]

    def covers(self, key: bytes) -> bool:
        """Whether all of an encoded prompt is in the store; TransferFailed after its `fail`."""
        with self._lock:
            if self._index.longest(key)[0] == count(key):
                return True
            if key in self._failures:
                reason = self._failures[key]
                raise TransferFailed(f"these tokens were not prefilled: {reason}", reason=reason)
            return False

    def lease(self, key: bytes) -> Match:
        """`select` of an encoded prompt, without waiting."""
        with self._lock:
            tokens, entry, hidden = self._find(key)
            requested = count(key)
            self._counters["tokens_requested"] += requested
            self._counters["tokens_found"] += tokens
            kind = "missed" if not tokens else "partial" if hidden is None else "complete"
            self._counters[kind] += 1
            if entry is None or not tokens:
                return Match(requested)
            self._entries.move_to_end(entry.key)
            entry.pins.append(None)
            metadata = _metadata(tokens, entry.data.metadata.num_layers, entry.data.metadata.extra)
            data = entry.data.first_tokens(tokens, metadata)
            return Match(requested, data, hidden, entry.pins.pop)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call this after every insert and failure, in the thread that made it."""
        with self._lock:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Stop calling this, if it is called."""
        with self._lock, contextlib.suppress(ValueError):
            self._watchers.remove(watcher)

    def stats(self) -> dict[str, int]:
        """Bytes and prompts now; selects by their result, evictions and tokens since the start."""
        with self._lock:
            names = ("complete", "partial", "missed", "evicted", "tokens_requested", "tokens_found")
            counted = {name: self._counters[name] for name in names}
            now = {"budget": self.budget, "used": self._used, "pinned": self._pinned()}
            return {**now, "prompts": len(self._entries), **counted}

    def _call_watchers(self) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher()

    # The methods below are called with the lock held.

    def _find(self, key: bytes) -> tuple[int, _Entry | None, torch.Tensor | None]:
        """The number of tokens not to be computed, their entry, and the last hidden state."""
        tokens, other = self._index.longest(key)
        if not tokens:
            return 0, None, None
        entry = self._entries[other]
        hidden = entry.hidden_of(tokens) if tokens == count(key) else None
        if hidden is None:
            tokens = min(tokens, count(key) - 1)
        return tokens, entry, hidden

    def _has(self, key: bytes, hidden: torch.Tensor | None) -> bool:
        """Whether an entry holds all that a new one would; it then counts as used."""
        tokens, other = self._index.longest(key)
        if tokens < count(key) or (
            hidden is not None and self._entries[other].hidden_of(tokens) is None
        ):
            return False
        self._entries.move_to_end(other)
        return True

    def _check_alike(self, data: KVCacheTransferData) -> None:
        """Raise SchemaError if layers, shapes or dtype differ from those of the other entries."""
        entry = next(iter(self._entries.values()), None)
        if entry is None:
            return
        new, stored = (
            f"{cache.metadata.num_layers} layers of {cache.metadata.dtype} "
            f"[tokens, *{tuple(cache.tensors()[0].shape[1:])}]"
            for cache in (data, entry.data)
        )
        if new != stored:
            raise SchemaError(f"{new}; the store holds {stored}")

    def _pinned(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values() if entry.pins)

    def _evict_for(self, nbytes: int) -> None:
        free = self.budget - self._pinned()
        if nbytes > free:
            raise CapacityError(
                f"{nbytes} bytes of K and V; {free} of the {self.budget} are not on lease",
                requested=nbytes,
                free=free,
            )
        while self._used + nbytes > self.budget:
            self._remove(next(entry for entry in self._entries.values() if not entry.pins))
            self._counters["evicted"] += 1

    def _add(self, entry: _Entry) -> None:
        replaced = self._entries.get(entry.key)  # it has fewer hidden states
        if replaced is not None:
            entry.pins = replaced.pins  # its matches end theirs
            self._remove(replaced)
        self._entries[entry.key] = entry
        self._index.add(entry.key)
        self._used += entry.nbytes

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        self._index.remove(entry.key)
        self._used -= entry.nbytes


def _metadata(tokens: int, layers: int, extra: Mapping[str, Any] | None) -> KVMetadata:
    return KVMetadata((tokens,), (tokens,), layers, extra=dict(extra or {}))


def _copy(view: TensorView) -> torch.Tensor:
    return view.dense() if isinstance(view, PagedTensor) else view.clone()
