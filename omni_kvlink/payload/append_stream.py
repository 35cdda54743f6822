"""The payloads of an append stream: a head with its spec, the chunks, and an end.

Head and chunks are a `TensorTransferData` each. A chunk has beside its tensors its number and a
running digest of all chunks before it, and the sizes of its requests if it is of many. The end, a
tensor of the head that is written last, has the count of the chunks and the digest of all of them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from omni_kvlink.errors import IntegrityError, SchemaError, WireError
from omni_kvlink.payload.chunk_requests import read_sizes
from omni_kvlink.payload.digests import ChunkDigest, compare
from omni_kvlink.payload.tensor_data import TensorTransferData, filled
from omni_kvlink.payload.tensor_memory import payload_views
from omni_kvlink.payload.views import check_view

if TYPE_CHECKING:
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.chunk_requests import PackedRequests, RequestSizes
    from omni_kvlink.payload.layout_cache import LayoutCache
    from omni_kvlink.payload.manifest import Layout, Manifest, TensorSpec
    from omni_kvlink.payload.views import TensorView

_POSITION = struct.Struct("<Q16s")
PLAIN_CHUNK = ("data", "position")
"""Names in the tree of a chunk that is of one request."""
_WITH_REQUESTS = ("data", "requests", "position")
Row = tuple[str, torch.dtype, list[int]]
"""Path, dtype and shape of a tensor, with -1 for the dimension that grows."""


class StreamPosition(NamedTuple):
    """The number of a chunk, and a running BLAKE2b of the headers of the chunks before it.

    The headers hold the digests of the tensors. A reader that begins in the middle knows no digest,
    and takes the one that its first chunk carries.
    """

    number: int = 0
    digest: bytes | None = bytes(16)

    def after(self, header: bytes | memoryview) -> StreamPosition:
        """Return the next position; `header` is all of the chunk's payload before its tensors."""
        running = hashlib.blake2b(self.digest or b"", digest_size=16)
        running.update(header)
        return StreamPosition(self.number + 1, running.digest())

    def encode(self) -> torch.Tensor:
        """Return the position as a chunk, or the end, carries it."""
        packed = bytearray(_POSITION.pack(self.number, self.digest))
        return torch.from_numpy(np.frombuffer(packed, np.uint8))

    def check(self, carried: StreamPosition) -> None:
        """IntegrityError unless this is the position that a chunk, or the end, carries.

        Then a chunk is missing, or one before it is not the one that was appended.
        """
        if carried.number != self.number:
            raise IntegrityError(f"chunk {carried.number} came instead of chunk {self.number}")
        if self.digest not in (None, carried.digest):
            raise IntegrityError(f"the chunks before {self.number} are not those appended")


class _PlannedChunk(TensorTransferData):
    """A chunk without metadata, of the shapes of the one before, whose layout it shares.

    Its tensors were checked. `beside` are those beside them. `layouts` are by `digests`, and filled
    by the first that needs one.
    """

    def __init__(
        self,
        request_id: str,
        tensors: dict[str, torch.Tensor],
        beside: dict[str, torch.Tensor],
        layouts: dict[bool, Layout],
    ):
        self.request_id, self.metadata = request_id, {}
        self._set_tree({"data": dict(tensors), **beside})
        self._views, self._layouts = [*tensors.values(), *beside.values()], layouts

    def tensors(self) -> list[TensorView]:
        return list(self._views)

    def find_layout(self, layouts: LayoutCache, *, digests: bool) -> Layout:
        layout = self._layouts.get(digests)
        if layout is None:
            layout = self._layouts[digests] = super().find_layout(layouts, digests=digests)
        return layout


class StreamSpec:
    """Names, dtypes and shapes of the tensors of every chunk, of which dimension `dim` grows.

    The sizes of `tensors` in that dimension do not count. SchemaError if one has no such dimension.
    """

    def __init__(
        self,
        request_id: str,
        tensors: Mapping[str, Any],
        dim: int,
        metadata: Mapping[str, Any] | None,
    ):
        self.dim, self._data = dim, TensorTransferData(request_id, tensors, metadata)
        self._rows = [self._row(path, view) for path, view in self._data._flat()]
        if not self._rows:
            raise SchemaError("the spec of a stream has no tensors")
        # Where each chunk's position is written: a tensor's making costs more than a small chunk.
        self._packed = bytearray(_POSITION.size)
        self._position = torch.from_numpy(np.frombuffer(self._packed, np.uint8))
        # Of the last chunk without metadata: name, dtype and shape of each tensor, its requests,
        # and its layouts.
        self._like: list[tuple[str, torch.dtype, torch.Size]] = []
        self._requests: PackedRequests | None = None
        self._layouts: dict[bool, Layout] = {}

    def head(self, end: torch.Tensor) -> TensorTransferData:
        """Return the payload that a reader receives first; and last, with the `end`."""
        data = self._data
        spec = filled(data.tree, map(self._empty, data.tensors()))
        about = {"dim": self.dim, "metadata": data.metadata}
        return TensorTransferData(data.request_id, {"spec": spec, "end": end}, about)

    def chunk(
        self,
        tensors: Mapping[str, Any],
        metadata: Mapping[str, Any] | None,
        position: StreamPosition,
        requests: PackedRequests | None = None,
    ) -> TensorTransferData:
        """Return the payload of a chunk, which is valid until the next call.

        SchemaError if its tensors are not as the spec says.
        """
        if not isinstance(tensors, Mapping):
            raise SchemaError(f"tensors: a {type(tensors).__name__}, wanted a dict of tensors")
        _POSITION.pack_into(self._packed, 0, position.number, position.digest)
        name, beside = self._data.request_id, {"position": self._position}
        if requests is not None:
            beside = {"requests": requests.packed, **beside}
        if not metadata and requests is self._requests and self._is_like_before(tensors):
            return _PlannedChunk(name, dict(tensors), beside, self._layouts)
        payload = TensorTransferData(name, {"data": tensors, **beside}, metadata)
        leaves = list(payload._flat())[: -len(beside)]
        rows = [self._row(path[len("/data") :], view) for path, view in leaves]
        wrong = "" if rows == self._rows else _difference(rows, self._rows)
        if requests is not None and not wrong:
            wrong = requests.sizes.difference([view.shape for _, view in leaves])
        if wrong:
            raise SchemaError(f"chunk {position.number}: {wrong}")
        if not metadata:
            self._remember(tensors, requests)
        return payload

    def _is_like_before(self, tensors: Mapping[str, Any]) -> bool:
        """Whether these are plain tensors as of the last chunk; SchemaError as of `check_view`."""
        if not self._like or len(tensors) != len(self._like):
            return False
        for (name, view), (expected, dtype, shape) in zip(tensors.items(), self._like, strict=True):
            if name != expected or type(view) is not torch.Tensor:
                return False
            if view.dtype is not dtype or view.shape != shape:
                return False
            check_view(view, f"tensor {f'data/{name}'!r:.200}")
        return True

    def _remember(self, tensors: Mapping[str, Any], requests: PackedRequests | None) -> None:
        self._like, self._layouts, self._requests = [], {}, requests
        if all(type(view) is torch.Tensor for view in tensors.values()):
            self._like = [(name, view.dtype, view.shape) for name, view in tensors.items()]

    def _row(self, path: str, view: TensorView) -> Row:
        shape = list(view.shape)
        if not -len(shape) <= self.dim < len(shape):
            raise SchemaError(f"tensor {path[1:]!r} of shape {shape} has no dimension {self.dim}")
        shape[self.dim] = -1
        return path, view.dtype, shape

    def _empty(self, view: TensorView) -> torch.Tensor:
        shape = list(view.shape)
        shape[self.dim] = 0
        return torch.empty(shape, dtype=view.dtype)


class StreamHead(NamedTuple):
    """A stream as its reader knows it before its first chunk: `spec` has its tensors, empty."""

    dim: int
    metadata: dict[str, Any]
    spec: TensorTransferData


def read_head(manifest: Manifest, region: Region) -> StreamHead:
    """Return what a head says; WireError if this is the payload of no stream."""
    _check(manifest, "spec", "end")
    data = TensorTransferData.from_region(manifest, region)
    dim, metadata = data.metadata.get("dim"), data.metadata.get("metadata")
    if not isinstance(dim, int) or not isinstance(metadata, dict):
        raise WireError(f"payload {manifest.request_id!r} is not the head of a stream")
    *views, _ = data.tensors()
    empty = [torch.empty(view.shape, dtype=view.dtype) for view in views]  # no views of the region
    spec = TensorTransferData(data.request_id, filled(data["spec"], empty))
    return StreamHead(dim, metadata, spec)


def open_chunk(
    manifest: Manifest, region: Region
) -> tuple[TensorTransferData, RequestSizes | None]:
    """Return the tensors of a chunk as views, and its requests; WireError if this is no chunk."""
    branch = manifest.branches[0]
    tree = branch.tree or {}
    has_requests = "requests" in tree
    _check(manifest, *(_WITH_REQUESTS if has_requests else PLAIN_CHUNK))
    requests = _read_requests(manifest, region, tree) if has_requests else None
    views = payload_views(region, manifest)[: 1 - len(tree)]
    data = TensorTransferData.of_views(manifest.request_id, tree["data"], views, branch.extra)
    return data, requests


def open_plain_chunk(manifest: Manifest, region: Region) -> TensorTransferData:
    """Return the tensors of a chunk of one request as views; its bytes may come into them later."""
    data, _ = open_chunk(manifest, region)
    return data


def check_chunk(manifest: Manifest, region: Region, position: StreamPosition) -> StreamPosition:
    """Check that what `open_chunk` took for a chunk is the one at `position`.

    Returns the next position. IntegrityError as of `StreamPosition.check`.
    """
    carried = _position(manifest, region)
    position.check(carried)
    return carried.after(region.read(0, manifest.header_nbytes))


def tensors_of_chunk(manifest: Manifest) -> Manifest:
    """The same chunk, restricted to the tensors that were appended."""
    return manifest.only(_chunk_specs(manifest))


def read_end(manifest: Manifest, region: Region, position: StreamPosition) -> int:
    """Return the number of chunks; IntegrityError unless all were received before `position`.

    A reader that asked for later chunks than there are has received none.
    """
    _check(manifest, "spec", "end")
    carried = _position(manifest, region)
    if position.digest is not None or carried.number >= position.number:
        position.check(carried)
    return carried.number


def _position(manifest: Manifest, region: Region) -> StreamPosition:
    return StreamPosition(*_POSITION.unpack(_read(manifest, region, manifest.tensors[-1])))


def _read(manifest: Manifest, region: Region, spec: TensorSpec) -> bytes:
    data = manifest.header_nbytes
    return region.read(data + spec.start, data + spec.stop)


def _chunk_specs(manifest: Manifest) -> tuple[TensorSpec, ...]:
    """The tensors of a chunk without those beside them."""
    tree = manifest.branches[0].tree or {}
    return manifest.tensors[: 1 - len(tree)]


def _read_requests(manifest: Manifest, region: Region, tree: Mapping[str, Any]) -> RequestSizes:
    """The requests of a chunk; WireError if they are not those of its tensors.

    IntegrityError if they have a digest and it is another one. Whether tensors are checked is the
    reader's choice; these say whose the tensors are, and are checked as a header is.
    """
    spec = manifest.tensors[-2]
    if tree["requests"] != 0 or (spec.dtype, len(spec.shape)) != ("U8", 1):
        raise WireError(f"payload {manifest.request_id!r}: requests are no bytes")
    packed = _read(manifest, region, spec)
    if spec.digest:
        digest = ChunkDigest(memoryview(packed))
        digest.advance(len(packed))
        compare(spec, digest.crcs)
    sizes = read_sizes(packed)
    if wrong := sizes.difference([tensor.shape for tensor in _chunk_specs(manifest)]):
        raise WireError(f"the requests of a chunk: {wrong}")
    return sizes


def _check(manifest: Manifest, *names: str) -> None:
    tree = manifest.branches[0].tree
    is_ours = not manifest.bundle and tree is not None and tuple(tree) == names
    if not is_ours or tree is None or not isinstance(tree[names[0]], dict):
        raise WireError(f"payload {manifest.request_id!r} is not of an append stream")
    position = manifest.tensors[-1]
    if (position.dtype, position.shape) != ("U8", (_POSITION.size,)):
        raise WireError(f"payload {manifest.request_id!r}: {names[-1]} is no position")


def _difference(rows: list[Row], spec: list[Row]) -> str:
    for row, expected in zip(rows, spec, strict=False):
        if row != expected:
            return f"{_text(row)}; the spec has {_text(expected)}"
    return f"{len(rows)} tensors; the spec has {len(spec)}"


def _text(row: Row) -> str:
    path, dtype, shape = row
    return f"tensor {path[1:]!r} of {dtype} {shape}"
