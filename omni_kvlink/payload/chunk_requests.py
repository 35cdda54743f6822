"""A chunk that carries tensors of many requests: which ones, how much of it each has, who ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch

from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.payload.branches import is_nested
from omni_kvlink.payload.format import MAX_ID
from omni_kvlink.payload.tensor_data import filled

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omni_kvlink.payload.tensor_data import TensorTransferData

MAX_REQUESTS = 65_536
"""Requests of one chunk."""
MAX_REASON = 4096
"""Characters of the reason why a request failed."""

_KEPT = 16
"""Requests of chunks that are remembered as they were: those of one step are those of the next."""
_MAX_KEPT = 64 << 10
"""Bytes of those of a peer, at most: it must not decide how much is remembered."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


class RequestSizes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The requests of a chunk, in the order in which their rows lie in its tensors.

    `sizes` count elements of dimension `dim`. Of `ended` and `failed` this is the last chunk.
    """

    dim: int
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_REQUESTS)]
    sizes: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_REQUESTS)]
    ended: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_REQUESTS)] = ()
    failed: Annotated[dict[Name, Reason], msgspec.Meta(max_length=MAX_REQUESTS)] = {}

    def difference(self, shapes: Sequence[Sequence[int]]) -> str:
        """Say how these shapes of tensors contradict the sizes; "" if they do not."""
        if not shapes:
            return "there are no tensors"
        total = sum(self.sizes)
        for shape in shapes:
            if not -len(shape) <= self.dim < len(shape):
                return f"a tensor of shape {list(shape)} has no dimension {self.dim}"
            if shape[self.dim] != total:
                return (
                    f"a tensor of shape {list(shape)} has {shape[self.dim]} rows in dimension "
                    f"{self.dim}, the requests have {total}"
                )
        return ""


_DECODER = msgspec.msgpack.Decoder(RequestSizes)


class PackedRequests(NamedTuple):
    """The sizes of a chunk's requests, and what the chunk carries of them: uint8 `[bytes]`."""

    sizes: RequestSizes
    packed: torch.Tensor

    @classmethod
    def of(
        cls,
        dim: int,
        requests: Mapping[str, int],
        ended: Iterable[str] = (),
        failed: Mapping[str, str] | None = None,
    ) -> PackedRequests:
        """Return the checked sizes; SchemaError if a reader would refuse them."""
        if not isinstance(requests, Mapping):
            kind = type(requests).__name__
            raise SchemaError(f"requests: a {kind}, wanted a dict of a size for each request")
        if isinstance(ended, str):
            raise SchemaError(f"ended={ended!r}: wanted a list of request ids")
        names, sizes = tuple(requests), tuple(requests.values())
        if not {*map(type, sizes)} <= {int}:  # those that are equal, as 1.0 is, may be remembered
            wrong = [f"{key!r}: a {type(size).__name__}" for key, size in requests.items()]
            raise SchemaError(f"requests: sizes {', '.join(wrong):.200}, wanted int")
        try:
            if ended or failed:
                reasons = {name: _cut(reason) for name, reason in dict(failed or {}).items()}
                return cls._of(RequestSizes(dim, names, sizes, tuple(ended), reasons))
            return _packed_like_before(dim, names, sizes)
        except (TypeError, ValueError, WireError) as error:
            raise SchemaError(str(error)) from None

    @classmethod
    def _of(cls, sizes: RequestSizes) -> PackedRequests:
        packed = msgspec.msgpack.encode(sizes)
        checked = read_sizes(packed)
        return cls(checked, torch.from_numpy(np.frombuffer(bytearray(packed), np.uint8)))


@lru_cache(maxsize=_KEPT)
def _packed_like_before(dim: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> PackedRequests:
    """The same requests go on, step by step."""
    return PackedRequests._of(RequestSizes(dim, names, sizes))


def _cut(reason: str) -> str:
    """A reason as a chunk may carry it: cut, and lone surrogates escaped."""
    if not isinstance(reason, str):
        raise TypeError(f"failed: reason {reason!r:.200}, wanted str")
    return reason.encode("utf-8", "backslashreplace").decode()[:MAX_REASON]


def read_sizes(packed: bytes) -> RequestSizes:
    """Return the sizes that a chunk carries; WireError if it is anything else."""
    return _read_like_before(packed) if len(packed) <= _MAX_KEPT else _read(packed)


def _read(packed: bytes) -> RequestSizes:
    try:
        found = _DECODER.decode(packed)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"the requests of a chunk: {error}") from None
    if len(found.names) != len(found.sizes) or len(set(found.names)) != len(found.names):
        raise WireError("the requests of a chunk: names and sizes are not one for each")
    return found


_read_like_before = lru_cache(maxsize=_KEPT)(_read)


class ChunkRequests(Mapping[str, Any]):
    """The tensors of a chunk by request id, in the order of its rows: `ReceivedChunk.requests`.

    Each value has the structure of the stream's spec: readonly views of the part of this request,
    which keep the memory of the chunk, also after its release.

    Attributes:
        ended: requests that have no chunks after this one.
        failed: requests that failed, each with the reason.
    """

    def __init__(self, sizes: RequestSizes, data: TensorTransferData):
        self.ended, self.failed = sizes.ended, dict(sizes.failed)
        tree, views = data.tree, data.tensors()
        columns = [torch.split(view, sizes.sizes, sizes.dim) for view in views]  # type: ignore[arg-type]
        rows = zip(sizes.names, zip(*columns, strict=True), strict=True)
        self._tensors: dict[str, Any]
        if is_nested(tree):
            self._tensors = {name: filled(tree, row) for name, row in rows}
        else:  # the same, for less than a microsecond each
            self._tensors = {name: dict(zip(tree, row, strict=True)) for name, row in rows}

    def __getitem__(self, request_id: str) -> Any:
        return self._tensors[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<ChunkRequests {', '.join(self._tensors):.200}>"
