"""`Layout`, which alike payloads have in common; `LayoutCache`, those that a link has met."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_kvlink.payload.branches import is_nested
from omni_kvlink.payload.header_template import MAX_SMALL, is_simple, quote_id
from omni_kvlink.payload.manifest import Manifest, TensorSpec, decode_header, header_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink._native.host import PackedLayout
    from omni_kvlink.payload.branches import Branch

_MAX_PLANNED = 256
_MAX_RECEIVED = 16


class Layout:
    """Everything that payloads have in common which differ in request id and digests only.

    Made from any manifest of the layout. It shares no dict with the manifests that it returns, so
    that a caller may modify the metadata in them.

    Attributes:
        data_nbytes: bytes behind the header.
        template: their headers.
        tensors: the tensors, the digits of their digests zero.
        is_plain: whether the payloads are a `TensorTransferData` without metadata or nesting.
        names: the first level of the tree of a `TensorTransferData`; empty for a cache or bundle.
    """

    def __init__(self, manifest: Manifest):
        tensors = manifest.tensors
        self._bundle, self._producer = manifest.bundle, manifest.producer.copy()
        self._branches = _copied(manifest.branches)
        self._has_dicts = any(branch.extra or branch.tree for branch in manifest.branches)
        first = manifest.branches[0]
        self.is_plain = len(manifest.branches) == 1 and not (
            first.extra or first.tree is None or is_nested(first.tree)
        )
        self.data_nbytes = manifest.data_nbytes
        self.names = () if manifest.bundle else tuple(first.tree or ())
        self.template = manifest.template or manifest.make_template()
        rows = [(spec.name, spec.dtype, spec.shape, spec.start, spec.stop) for spec in tensors]
        self._columns = tuple(zip(*rows, strict=True)) or ((),) * 5
        self.tensors = tuple(map(TensorSpec, *self._columns, self.template.blank_digests))

    def plan(self, request_id: str) -> Manifest:
        """The manifest that `Manifest.lay_out` returns for a payload of this layout."""
        header_nbytes = self.template.header_nbytes(len(quote_id(request_id)))
        return self._manifest(request_id, self.tensors, header_nbytes, is_plan=True)

    def match(self, text: bytes, total: int) -> str:
        """The request id in a header's JSON; "" if it is not of this layout.

        `total` are the bytes of the payload.
        """
        if 8 + len(text) + self.data_nbytes != total:
            return ""
        return self.template.match(text)

    def manifest(self, request_id: str, text: bytes) -> Manifest:
        """The manifest of a header with this JSON, of which `match` has returned the request id."""
        digests = self.template.digests(request_id, text)
        tensors = tuple(map(TensorSpec, *self._columns, digests))
        return self._manifest(request_id, tensors, 8 + len(text), is_plan=False)

    def _manifest(
        self, request_id: str, tensors: tuple[TensorSpec, ...], header_nbytes: int, *, is_plan: bool
    ) -> Manifest:
        branches = self._branches
        if self.is_plain:  # what `_copied` returns of it costs a small payload more
            (branch,) = branches
            assert branch.tree is not None
            branches = (msgspec.structs.replace(branch, extra={}, tree=branch.tree.copy()),)
        elif self._has_dicts:
            branches = _copied(branches)
        return Manifest(
            request_id=request_id,
            bundle=self._bundle,
            branches=branches,
            tensors=tensors,
            header_nbytes=header_nbytes,
            nbytes=header_nbytes + self.data_nbytes,
            producer=self._producer.copy(),
            template=self.template,
            is_plan=is_plan,
        )


class KnownHeader(msgspec.Struct, frozen=True, gc=False):
    """A valid header that differs from an earlier one in request id and digests only."""

    request_id: str
    layout: Layout
    text: bytes
    """Its JSON."""

    @property
    def header_nbytes(self) -> int:
        """Bytes of the header."""
        return 8 + len(self.text)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors, the digits of their digests zero."""
        return self.layout.tensors

    @property
    def packed(self) -> PackedLayout | None:
        """The layout as the native library takes it; None if there is no library."""
        return self.layout.template.packed

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
            self._add(key, layout)
        return layout

    def add_plan(self, key: Any, plan: Manifest) -> None:
        """Keep what `Manifest.lay_out` returned, for later payloads with this key."""
        if (layout := Layout(plan)).template.is_small:
            self._add(key, layout)

    def _add(self, key: Any, layout: Layout) -> None:
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
            for layout in self._received:
                request_id = layout.match(text, total)
                if request_id:
                    self._add_received(layout)
                    return KnownHeader(request_id, layout, text)
        manifest = decode_header(text, total)
        template = manifest.template
        if template is not None and template.is_small and is_simple(manifest.request_id):
            self._add_received(Layout(manifest))
        return manifest

    def _add_received(self, layout: Layout) -> None:
        """Make a layout the first that `read_header` compares."""
        received = self._received
        is_repeated = bool(received) and received[0] is layout
        self._repeated = layout if is_repeated else None
        if not is_repeated:
            older = [other for other in received if other is not layout]
            self._received = (layout, *older[: _MAX_RECEIVED - 1])

    def repeated(self, limit: int) -> Layout | None:
        """The layout of the last two headers that were read, if it was the same one.

        None also if its payloads have more than `limit` bytes behind the header.
        """
        layout = self._repeated
        return layout if layout is not None and layout.data_nbytes <= limit else None


def _copied(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    """The same branches with dicts of their own."""
    return tuple(
        [
            msgspec.structs.replace(
                branch,
                extra=_copy(branch.extra) if branch.extra else {},
                tree=_copy(branch.tree) if branch.tree else branch.tree,
            )
            for branch in branches
        ]
    )


def _copy(value: Any) -> Any:
    """A copy of nested dicts and lists."""
    if isinstance(value, dict):
        copied = value.copy()
        for key, inner in value.items():
            if isinstance(inner, (dict, list)):
                copied[key] = _copy(inner)
        return copied
    return [_copy(inner) if isinstance(inner, (dict, list)) else inner for inner in value]
