"""omni_kvlink: transfers KV caches from one engine stage to the next, bit-exact, with one copy.

Importing this imports no connector and has no side effect. A name's module, and with it torch, is
imported when the name is first used.
"""

from importlib import import_module as _import_module
from sys import platform as _platform
from typing import TYPE_CHECKING

if _platform != "linux":  # before an import that fails for lack of memfd, eventfd or AF_UNIX
    raise ImportError(f"omni_kvlink needs Linux; this Python runs on {_platform!r}")

from omni_kvlink._version import __version__ as __version__
from omni_kvlink.errors import BusyError as BusyError
from omni_kvlink.errors import CapacityError as CapacityError
from omni_kvlink.errors import ClosedError as ClosedError
from omni_kvlink.errors import ConnectorError as ConnectorError
from omni_kvlink.errors import DuplicateKeyError as DuplicateKeyError
from omni_kvlink.errors import FileError as FileError
from omni_kvlink.errors import IntegrityError as IntegrityError
from omni_kvlink.errors import KVLinkError as KVLinkError
from omni_kvlink.errors import MissingError as MissingError
from omni_kvlink.errors import MissingFileError as MissingFileError
from omni_kvlink.errors import NativeError as NativeError
from omni_kvlink.errors import PeerLostError as PeerLostError
from omni_kvlink.errors import SchemaError as SchemaError
from omni_kvlink.errors import TransferFailed as TransferFailed
from omni_kvlink.errors import TransferTimeout as TransferTimeout
from omni_kvlink.errors import UnavailableError as UnavailableError
from omni_kvlink.errors import VersionError as VersionError
from omni_kvlink.errors import WireError as WireError

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Ledger as Ledger
    from omni_kvlink.connectors.protocol.transfer import Receipt as Receipt
    from omni_kvlink.link import Allocation as Allocation
    from omni_kvlink.link import AppendStream as AppendStream
    from omni_kvlink.link import ChunkStream as ChunkStream
    from omni_kvlink.link import ChunkStreams as ChunkStreams
    from omni_kvlink.link import KVConsumer as KVConsumer
    from omni_kvlink.link import KVLink as KVLink
    from omni_kvlink.link import KVProducer as KVProducer
    from omni_kvlink.link import LinkOptions as LinkOptions
    from omni_kvlink.link import Payload as Payload
    from omni_kvlink.link import PendingBatch as PendingBatch
    from omni_kvlink.link import PutStream as PutStream
    from omni_kvlink.link import Received as Received
    from omni_kvlink.link import ReceivedBatch as ReceivedBatch
    from omni_kvlink.link import ReceivedChunk as ReceivedChunk
    from omni_kvlink.link import ReceivedLayer as ReceivedLayer
    from omni_kvlink.link import ReceivedStream as ReceivedStream
    from omni_kvlink.link import Verify as Verify
    from omni_kvlink.payload.branches import Shard as Shard
    from omni_kvlink.payload.bundle import BundleBranch as BundleBranch
    from omni_kvlink.payload.bundle import KVCacheBundle as KVCacheBundle
    from omni_kvlink.payload.bundle import KVPayload as KVPayload
    from omni_kvlink.payload.bundle import PrefixOf as PrefixOf
    from omni_kvlink.payload.bundle import SameAs as SameAs
    from omni_kvlink.payload.chunk_requests import ChunkRequests as ChunkRequests
    from omni_kvlink.payload.paged import BlockTable as BlockTable
    from omni_kvlink.payload.paged import PagedTensor as PagedTensor
    from omni_kvlink.payload.paged import split_packed as split_packed
    from omni_kvlink.payload.paged import split_stacked as split_stacked
    from omni_kvlink.payload.schema import KVCacheTransferData as KVCacheTransferData
    from omni_kvlink.payload.schema import KVMetadata as KVMetadata
    from omni_kvlink.payload.tensor_data import TensorTransferData as TensorTransferData
    from omni_kvlink.payload.views import TensorView as TensorView

_NAMES = {
    "connectors.protocol.transfer": ("Ledger", "Receipt"),
    "link": (
        "Allocation",
        "AppendStream",
        "ChunkStream",
        "ChunkStreams",
        "KVConsumer",
        "KVLink",
        "KVProducer",
        "LinkOptions",
        "Payload",
        "PendingBatch",
        "PutStream",
        "Received",
        "ReceivedBatch",
        "ReceivedChunk",
        "ReceivedLayer",
        "ReceivedStream",
        "Verify",
    ),
    "payload.branches": ("Shard",),
    "payload.bundle": ("BundleBranch", "KVCacheBundle", "KVPayload", "PrefixOf", "SameAs"),
    "payload.chunk_requests": ("ChunkRequests",),
    "payload.paged": ("BlockTable", "PagedTensor", "split_packed", "split_stacked"),
    "payload.schema": ("KVCacheTransferData", "KVMetadata"),
    "payload.tensor_data": ("TensorTransferData",),
    "payload.views": ("TensorView",),
}
"""The public names that are imported when they are first used, by module."""

_REMOVED = {
    "Paged": "PagedTensor",
    "Pages": "BlockTable",
    "arena": "lowlevel",
    "branch": "Shard",
    "bundle": "KVCacheBundle",
    "files": "KVCacheTransferData.save",
    "header": "lowlevel.Manifest",
    "ledger": "Ledger",
    "metadata": "KVMetadata",
    "paged": "PagedTensor",
    "places": "TensorView",
    "pools": "split_packed",
    "schema": "KVCacheTransferData",
    "tensors": "lowlevel",
    "wire": "lowlevel.Manifest",
}
"""Public names of 0.1 and their replacements; they raise for one release."""

_ELSEWHERE = {
    "adapters": ("BagelAdapter", "DynamicCacheAdapter", "PagedAdapter"),
    "connectors": ("OmniConnector", "SharedMemoryConnector", "UCXConnector", "ZMQConnector"),
    "copier": ("NativeCopier", "PinnedCopier", "TorchCopier"),
    "engine": (
        *("AREngine", "DiffusionEngine", "DiffusionKVManager", "DiffusersPipelineExecutor"),
        *("GPUARModelRunner", "GPUARWorker", "GPUDiffusionModelRunner", "GPUDiffusionWorker"),
        *("IntermediateTensors", "KVManager", "MultiprocExecutor", "OmniARScheduler"),
        *("OmniDiffusion", "OmniDiffusionConfig", "OmniDiffusionRequest", "SyncScheduler"),
        "TeaCache",
    ),
    "models.bagel": ("BagelPipeline", "NaiveCache"),
}
"""Names of other modules that people look for here, by module; each raises with its import line."""

if not TYPE_CHECKING:  # a type checker knows the names of the block above, and reports all others
    _HOMES = {name: module for module, names in _NAMES.items() for name in names}
    __all__ = sorted(
        {*_HOMES, *(name for name in globals() if name[0].isupper())} - {"TYPE_CHECKING"}
    )

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            value = getattr(_import_module(f"omni_kvlink.{_HOMES[name]}"), name)
            globals()[name] = value
            return value
        if name in _REMOVED:
            # Not AttributeError, whose text `from omni_kvlink import name` would replace.
            raise ImportError(f"omni_kvlink.{name} was removed: use omni_kvlink.{_REMOVED[name]}")
        for module, names in _ELSEWHERE.items():
            if name in names:
                raise ImportError(f"{name}: from omni_kvlink.{module} import {name}")
        raise AttributeError(f"module 'omni_kvlink' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
