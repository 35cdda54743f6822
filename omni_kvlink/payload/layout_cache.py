"""`LayoutCache`: the layouts of earlier payloads, with which later headers are read and planned."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from omni_kvlink.payload.format import ALIGN
from omni_kvlink.payload.manifest import (
    MAX_SMALL,
    PARENT,
    TRACE,
    Layout,
    TensorSpec,
    decode_header,
    header_text,
    is_simple,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

_MAX_PLANNED = 256
_MAX_RECEIVED = 16
_TRACED = re.compile(re.escape(PARENT) + rb'([0-9a-f-]{55})\\"')


class KnownHeader(msgspec.Struct, frozen=True, gc=False):
    """A valid header with this JSON, of the layout of an earlier one."""

    request_id: str
    layout: Layout
    text: bytes
    header_nbytes: int
    tensors: tuple[TensorSpec, ...]
    """The tensors, the digits of their digests zero."""

    @property
    def producer(self) -> dict[str, str]:
        """About the producer; not to be modified."""
        return self.layout.producer

    def manifest(self) -> Manifest:
        """The manifest of this header."""
        return self.layout.manifest(self.request_id, self.text)


class LayoutCache:
    """The layouts of the payloads that one end of a link planned or received last.

    At most `_MAX_PLANNED` and `_MAX_RECEIVED`, none with a header of more than `MAX_SMALL` bytes,
    so that a peer which sends many cannot fill the memory.

    Without a lock, which a fork could leave locked. Of the planned ones there are two dicts, of
    which a full one replaces the older one; the received ones are a tuple, replaced as a whole.
    Threads that add at the same time lose a layout at worst.
    """

    def __init__(self) -> None:
        self._planned: dict[Any, Layout] = {}
        self._planned_before: dict[Any, Layout] = {}
        self._received: tuple[Layout, ...] = ()
        self._repeated: Layout | None = None

    def find(self, key: Any) -> Layout | None:
        """The layout of an earlier payload that had the same key; None if none is kept.

        The key tells all that `Manifest.lay_out` takes but the request id.
        """
        layout = self._planned.get(key)
        if layout is None and (layout := self._planned_before.get(key)) is not None:
            self.add(key, layout)
        return layout

    def add(self, key: Any, layout: Layout | None) -> None:
        """Keep the layout of a plan for later payloads with this key, unless its header is long."""
        if layout is None or not layout.is_small:
            return
        if len(self._planned) >= _MAX_PLANNED // 2:
            self._planned, self._planned_before = {}, self._planned
        self._planned[key] = layout

    def decode(self, buffer: bytes | memoryview, nbytes: int | None = None) -> Manifest:
        """The manifest that `Manifest.decode` returns, sooner if its layout is kept."""
        header = self.read_header(buffer, nbytes)
        return header.manifest() if isinstance(header, KnownHeader) else header

    def read_header(
        self, buffer: bytes | memoryview, nbytes: int | None = None
    ) -> Manifest | KnownHeader:
        """Read and completely validate a header; arguments and errors as of `Manifest.decode`.

        One that differs from one of the last ones in request id and digests only is compared with
        it, byte for byte, instead of being decoded.
        """
        total = len(buffer) if nbytes is None else nbytes
        text = header_text(buffer, total)
        if len(text) <= MAX_SMALL:
            known = self._find_received(text, total)
            if known is not None:
                return known
        manifest = decode_header(text, total)
        new = manifest.layout
        if new is not None and new.is_small and is_simple(manifest.request_id):
            untraced = new.with_trace({}) if TRACE & new.producer.keys() else new
            self._add_received(untraced, is_traced=untraced is not new)
        return manifest

    def open_copy(
        self, region: Region, head: memoryview, request_id: str, make: int
    ) -> tuple[KnownHeader, list[Any]] | None:
        """Do what `read_header` does, and make views of all tensors, in one call if it can.

        `region` is the caller's own copy of a payload that begins with `head`; `make` is an address
        of `dlpack.maker_of`. None unless its layout is kept, has a `kind`, and the library is here.
        """
        total = region.nbytes
        header_nbytes = 8 + int.from_bytes(head[:8], "little")
        if not make or header_nbytes % ALIGN:
            return None
        text = bytes(head[8:header_nbytes])
        for kept, layout in self._candidates(text, total):
            if not layout.kind:
                continue
            if (packed := layout.packed) is None:
                return None
            sizes, key = (total, header_nbytes), request_id.encode()
            views = packed.open(region.address, sizes, key, region.span, make)
            if views is not None:
                self._add_received(kept, is_traced=layout is not kept)
                tensors = layout.tensors
                return KnownHeader(request_id, layout, text, header_nbytes, tensors), views
        return None

    def _find_received(self, text: bytes, total: int) -> KnownHeader | None:
        """Compare a header with the kept ones."""
        for kept, layout in self._candidates(text, total):
            request_id = layout.match(text, total)
            if request_id:
                self._add_received(kept, is_traced=layout is not kept)
                return KnownHeader(request_id, layout, text, 8 + len(text), layout.tensors)
        return None

    def _candidates(self, text: bytes, total: int) -> Iterator[tuple[Layout, Layout]]:
        """The kept layouts for a payload of this size, and each with the header's trace context."""
        traced = _TRACED.search(text) if PARENT in text else None
        trace = None if traced is None else {"traceparent": traced[1].decode()}
        for kept in self._received:
            if 8 + len(text) + kept.data_nbytes == total:
                yield kept, kept if trace is None else kept.with_trace(trace)

    def _add_received(self, layout: Layout, *, is_traced: bool = False) -> None:
        """Make a layout the first that `read_header` compares."""
        received = self._received
        is_repeated = bool(received) and received[0] is layout
        self._repeated = layout if is_repeated and not is_traced else None
        if not is_repeated:
            older = [other for other in received if other is not layout]
            self._received = (layout, *older[: _MAX_RECEIVED - 1])

    def repeated(self, limit: int) -> Layout | None:
        """The layout of the last two headers that were read, if it was the same one.

        None also if its payloads have more than `limit` bytes behind the header.
        """
        layout = self._repeated
        return layout if layout is not None and layout.data_nbytes <= limit else None
