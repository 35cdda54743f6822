"""The interface of an adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata

C = TypeVar("C")


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
