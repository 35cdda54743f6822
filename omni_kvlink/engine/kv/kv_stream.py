"""`KVStream`: a request's KV on its way to the next stage, while its last pass is computed."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVPayload, PrefixOf, SameAs
from omni_kvlink.engine.kv_sent import KVSent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from omni_kvlink import KVProducer, PutStream, Receipt
    from omni_kvlink.engine.config import KVConfig
    from omni_kvlink.engine.kv.kv_partition import KVPart


class KVStream:
    """The KV of one request, which leaves layer by layer, or all at once where no layer left.

    Each of the sender's `parts` is a payload of its own. The runner's thread alone uses it.
    """

    def __init__(self, link: KVProducer, parts: Sequence[KVPart], parts_each: int, kv: KVConfig):
        self._link, self._parts, self._parts_each, self._config = link, parts, parts_each, kv
        self._payload: KVPayload | None = None
        self._streams: list[PutStream] = []
        self._layers: dict[tuple[str, int], list[Callable[[], None]]] = {}  # not written yet
        self._error: Exception | None = None

    @property
    def is_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._payload is not None

    def begin(self, payload: KVPayload) -> None:
        """Take views of where the whole KV will be, with its metadata; nothing is sent yet."""
        self._payload = payload

    def write_layer(self, layer: int, branch: str = "") -> None:
        """Send a layer whose K and V are written, or are in the work of the current CUDA stream.

        `branch` names that of the bundle which has the tensors; those that share them leave, too.
        The first layer announces the KV, and blocks for its memory up to `put_timeout` seconds.
        Raises nothing, for other requests share the pass that it is called in: `finish` raises it.
        """
        if self._error is not None:
            return
        try:
            self._open()
            for write in self._layers.pop((branch, layer), ()):
                write()
        except Exception as error:
            self._error = error
            self.fail(f"layer {layer} of branch {branch!r} could not be sent: {error}")

    def finish(self, extra: Mapping[str, Any] | None = None) -> KVSent:
        """Send the layers that did not leave yet, and commit; K and V may change then.

        `extra` is the metadata at its end, as of `PutStream.finish`. Raises what `write_layer` met,
        and as `KVProducer.put`. After an error, call `fail`: some of the parts may have been sent.
        """
        if self._error is not None:
            raise self._error
        assert self._payload is not None
        if self._streams:
            for writes in self._layers.values():
                for write in writes:
                    write()
            receipts = [stream.finish(extra) for stream in self._streams]
        else:
            receipts = list(self._put_all(self._payload))
        largest = max((receipt.ledger.nbytes for receipt in receipts), default=0)
        whole = self._payload
        first = whole[next(iter(whole))] if isinstance(whole, KVCacheBundle) else whole
        nbytes, metadata = largest * self._parts_each, first.metadata
        return KVSent(nbytes, metadata.image_shape, metadata.seq_len)

    def fail(self, reason: str) -> None:
        """Fail what was begun, unless it is committed: its readers raise with this reason."""
        for stream in self._streams:
            stream.fail(reason)

    def _open(self) -> None:
        """Announce the KV, the first time."""
        assert self._payload is not None
        if self._streams:
            return
        for part, piece, timeout in self._pieces(self._payload):
            ttl = self._config.ttl
            out = self._link.stream_put(piece, readers=part.readers, ttl=ttl, timeout=timeout)
            self._streams.append(out)
            for key, write in _writes(out, piece, self._payload, is_cut=part.stages > 1):
                self._layers.setdefault(key, []).append(write)

    def _put_all(self, payload: KVPayload) -> Iterator[Receipt]:
        for part, piece, timeout in self._pieces(payload):
            ttl = self._config.ttl
            yield self._link.put(piece, readers=part.readers, ttl=ttl, timeout=timeout)

    def _pieces(self, payload: KVPayload) -> Iterator[tuple[KVPart, KVPayload, float]]:
        """Each part, its payload, and the seconds that are left for its memory."""
        deadline = time.monotonic() + self._config.put_timeout
        for part in self._parts:
            yield part, part.cut(payload), max(0.0, deadline - time.monotonic())


def _writes(
    out: PutStream, piece: KVPayload, whole: KVPayload, *, is_cut: bool
) -> Iterator[tuple[tuple[str, int], Callable[[], None]]]:
    """Yield the call that sends each layer of a part, by who has its tensors: branch and layer.

    These are of the whole. With `is_cut` the part has some of the layers: see `KVPart.cut`.
    """
    names = list(piece) if isinstance(piece, KVCacheBundle) else [""]
    for name in names:
        cache = piece.branches[name] if isinstance(piece, KVCacheBundle) else piece
        if not isinstance(cache, KVCacheTransferData) or cache.is_empty:
            continue
        declared = whole.branches[name] if isinstance(whole, KVCacheBundle) else whole
        owner = declared.branch if isinstance(declared, (SameAs, PrefixOf)) else name
        first = cache.metadata.extra["layers"][0] if is_cut else 0
        for number, views in enumerate(zip(*cache.layer_blocks.values(), strict=True)):
            yield (owner, first + number), partial(out.write_layer, number, *views, branch=name)
