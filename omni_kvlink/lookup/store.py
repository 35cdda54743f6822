"""`PrefixStore`: K and V of many prompts in a link's memory, found by their longest prefix."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections import Counter, OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.errors import SchemaError, TransferFailed, TransferTimeout, format_seconds
from omni_kvlink.link import check_timeout, open_kept
from omni_kvlink.lookup.cached_prompt import cache_payload, metadata, read_match
from omni_kvlink.lookup.match import Match
from omni_kvlink.lookup.messages import Found
from omni_kvlink.lookup.tokens import PrefixIndex, TokenIds, count, encode
from omni_kvlink.payload.kv_checks import check_reason
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.settings import Flag
from omni_kvlink.system.waits import LazyEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import KVProducer
    from omni_kvlink.lookup.tokens import Namespace
    from omni_kvlink.payload.views import TensorView

MAX_FAILURES = 4096


class _Entry(NamedTuple):
    """One prompt: the receipt of its kept payload, which has `states` hidden states."""

    receipt: Receipt
    states: int
    form: str


class PrefixStore:
    """K and V by token prefix, as kept payloads of a link; thread-safe.

    The link's `quota` is what the store may have. The least recently used prompts are evicted for
    new ones, except those that a reader has. The position of a token is its index. Prompts match
    inside one namespace only.

    Args:
        link: served here; the store ends with it. Other payloads of the link are in its quota, too.
    """

    def __init__(self, link: KVProducer):
        self.link = link
        self._lock = threading.RLock()
        self._index = PrefixIndex()
        self._entries: dict[bytes, _Entry] = {}
        # Prompts whose payload has ended, and its request id: filled with the link locked.
        self._ended: deque[tuple[bytes, str]] = deque()
        # No two stores have a request id in common, also not those of one process after another.
        self._prefix, self._numbers = f"lookup/{uuid.uuid4().hex}", itertools.count()
        self._failures: OrderedDict[bytes, str] = OrderedDict()
        self._watchers: list[Callable[[], None]] = []
        self._counters: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<PrefixStore at {self.link.url}: {len(self._entries)} prompts>"

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
    ) -> None:
        """Copy the K and V of a prompt into the link's memory, and wake the calls that wait for it.

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

        Raises:
            SchemaError: the tensors do not fit the tokens, or what the store holds already; or the
                namespace is none.
            CapacityError: not enough memory beside the prompts that readers have; it waits for
                none.
        """
        key = encode(tokens, roi, namespace)
        blocks = {"key_cache": list(keys), "value_cache": list(values)}
        about = metadata(count(key), len(blocks["key_cache"]), extra)
        data = KVCacheTransferData("prefix", blocks, (), about)
        if hidden is not None and (hidden.dim() != 2 or not 1 <= len(hidden) <= count(key)):
            raise SchemaError(f"hidden: {list(hidden.shape)}; wanted [1…{count(key)}, dim]")
        form = self._check_alike(data)
        if not self._use(key, with_hidden=hidden is not None):
            self._put(key, data, hidden, form)
        with self._lock:
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

        Its tensors are views of the link's memory, which must not be written. With `wait`, it
        blocks up to `timeout` seconds until the K and V of all of them are here: decode before
        prefill. The other arguments are as for `insert`. TransferFailed if `fail` was called for
        this prompt, TransferTimeout if not all tokens were inserted in time.
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
                if self.covers(key):
                    return self.lease(key)
                if not changed.wait(deadline - time.monotonic()):
                    here, limit = self._longest(key)[0], format_seconds(timeout)
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

    def covers(self, key: bytes) -> bool:
        """Whether all of an encoded prompt is in the store; TransferFailed after its `fail`."""
        with self._lock:
            if self._longest(key)[0] == count(key):
                return True
            if key in self._failures:
                reason = self._failures[key]
                raise TransferFailed(f"these tokens were not prefilled: {reason}", reason=reason)
            return False

    def find(self, key: bytes) -> Found:
        """Return what is here of an encoded prompt; it may be evicted before it is got."""
        with self._lock:
            hit, requested = self._find(key), count(key)
            self._counters["tokens_requested"] += requested
            self._counters["tokens_found"] += hit.tokens
            kind = "missed" if not hit.tokens else "partial" if hit.row is None else "complete"
            self._counters[kind] += 1
        return hit

    def lease(self, key: bytes, hit: Found | None = None, *, verify: bool = False) -> Match:
        """`select` of an encoded prompt, without waiting; of what was `found`, if that is kept yet.

        With `verify`, every byte was compared with its digest; IntegrityError if one is wrong.
        """
        hit, requested = hit or self.find(key), count(key)
        while hit.tokens:
            received = open_kept(self.link, hit.entry)
            if received is not None:
                return read_match(received, hit, requested, verify=verify)
            with self._lock:  # it was evicted since
                hit = self._find(key)
        return Match(requested)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call this after every insert and failure, in the thread that made it."""
        with self._lock:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Stop calling this, if it is called."""
        with self._lock, contextlib.suppress(ValueError):
            self._watchers.remove(watcher)

    def stats(self) -> dict[str, int]:
        """Prompts now; questions and selects by their result, evictions and tokens since the start.

        The link's `stats()` has the bytes.
        """
        with self._lock:
            self._forget_ended()
            names = ("complete", "partial", "missed", "evicted", "tokens_requested", "tokens_found")
            return {"prompts": len(self._entries), **{name: self._counters[name] for name in names}}

    def _call_watchers(self) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher()

    def _check_alike(self, data: KVCacheTransferData) -> str:
        """Layers, shapes and dtype; SchemaError if they differ from those of the other entries."""
        new = (
            f"{data.metadata.num_layers} layers of {data.metadata.dtype} "
            f"[tokens, *{tuple(data.tensors()[0].shape[1:])}]"
        )
        with self._lock:
            self._forget_ended()
            entry = next(iter(self._entries.values()), None)
        if entry is not None and entry.form != new:
            raise SchemaError(f"{new}; the store holds {entry.form}")
        return new

    def _use(self, key: bytes, *, with_hidden: bool) -> bool:
        """Whether an entry holds all that a new one would; it then counts as used."""
        with self._lock:
            tokens, other = self._longest(key)
            if tokens < count(key) or (with_hidden and self._row(other, tokens) is None):
                return False
            request_id = self._entries[other].receipt.key
        received = open_kept(self.link, request_id)
        if received is not None:
            received.release()
        return received is not None

    def _put(
        self, key: bytes, data: KVCacheTransferData, hidden: torch.Tensor | None, form: str
    ) -> None:
        """Keep a payload of a prompt, instead of one with fewer hidden states."""
        request_id = f"{self._prefix}/{next(self._numbers)}"
        payload = cache_payload(request_id, data, hidden)
        receipt = self.link.put(payload, readers=None, timeout=0.0, digests=True)
        new = _Entry(receipt, 0 if hidden is None else len(hidden), form)
        with self._lock:
            self._forget_ended()
            spare = self._entries.get(key)
            if spare is None:
                self._index.add(key)
            elif spare.states > new.states:  # another thread was faster
                new, spare = spare, new
            self._entries[key] = new
            receipt.add_done_callback(partial(self._ended.append, (key, request_id)))
        if spare is not None:
            self.link.withdraw(spare.receipt.key)

    def _longest(self, key: bytes) -> tuple[int, bytes]:
        """The number of tokens that are here, and an entry that has them."""
        with self._lock:
            self._forget_ended()
            return self._index.longest(key)

    # The methods below are called with the lock held.

    def _forget_ended(self) -> None:
        """Forget the prompts whose payloads were evicted, or have failed."""
        while self._ended:
            key, request_id = self._ended.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.receipt.key == request_id:
                del self._entries[key]
                self._index.remove(key)
                self._counters["evicted"] += entry.receipt.state == "evicted"

    def _row(self, other: bytes, tokens: int) -> int | None:
        """Return the row of the hidden state of an entry's token number `tokens`, from 1."""
        row = tokens - 1 - count(other) + self._entries[other].states
        return row if row >= 0 else None

    def _find(self, key: bytes) -> Found:
        tokens, other = self._longest(key)
        if not tokens:
            return Found(0)
        row = self._row(other, tokens) if tokens == count(key) else None
        if row is None:
            tokens = min(tokens, count(key) - 1)
        if not tokens:
            return Found(0)
        return Found(tokens, self._entries[other].receipt.key, count(other), row)
