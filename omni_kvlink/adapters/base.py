"""The interface of an adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.views import dense

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from omni_kvlink.payload.schema import KVMetadata

C = TypeVar("C")


class PayloadStream(Protocol):
    """A payload whose metadata and shapes are known, such as a `ReceivedStream`."""

    @property
    def payload(self) -> Any:
        """Its tensors, whose bytes may not be there yet."""


class CacheAdapter(ABC, Generic[C]):
    """Converts an engine's cache to and from the schema; `check_adapter` checks implementations."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def export(
        self, cache: C, *, request_id: str, metadata: KVMetadata | Mapping[str, Any]
    ) -> KVCacheTransferData:
        """Return the cache as transfer data; borrows its tensors, copies none.

        Raises:
            SchemaError: the cache is incomplete or contradicts the metadata.
        """

    @abstractmethod
    def load(self, data: KVCacheTransferData, into: C) -> C:
        """Fill an empty cache of the right size and return it.

        The tensors are shared, not copied, unless the engine's cache has memory of its own.

        Raises:
            SchemaError: `into` has another number of layers.
        """

    def targets(self, cache: C) -> Callable[[PayloadStream], KVCacheTransferData]:
        """Return the `into` of `KVConsumer.get` that fills an empty cache, while it is written.

        Unlike those of `load`, the tensors are the cache's own, and writable. After an error of
        `get` the cache is worthless. SchemaError, in `get`, as of `load`, or for a bundle.
        """
        filled = list[KVCacheTransferData]()

        def targets(stream: PayloadStream) -> KVCacheTransferData:
            if not filled:  # else the connection broke meanwhile
                data = cache_of(stream)
                blocks = {
                    name: [None if view is None else torch.empty_like(dense(view)) for view in part]
                    for name, part in data.layer_blocks.items()
                }
                filled.append(KVCacheTransferData(data.request_id, blocks, [], data.metadata))
                self.load(filled[0], cache)
            return filled[0]

        return targets


def cache_of(stream: PayloadStream) -> KVCacheTransferData:
    """Return the cache that a stream brings; SchemaError if it is another payload."""
    data = stream.payload
    if not isinstance(data, KVCacheTransferData):
        text = f"payload {data.request_id!r} is a {type(data).__name__}, no single cache"
        raise SchemaError(text)
    return data
