"""omni_kvlink: KV caches from one engine stage to the next, bit-exact, with one copy.

Importing this imports no connector and has no side effect.
"""

from ._version import __version__ as __version__
from .branch import Shard as Shard
from .bundle import KVCacheBundle as KVCacheBundle
from .bundle import PrefixOf as PrefixOf
from .bundle import SameAs as SameAs
from .connectors.base import Receipt as Receipt
from .errors import BusyError as BusyError
from .errors import CapacityError as CapacityError
from .errors import ClosedError as ClosedError
from .errors import ConnectorError as ConnectorError
from .errors import DuplicateKeyError as DuplicateKeyError
from .errors import IntegrityError as IntegrityError
from .errors import KVLinkError as KVLinkError
from .errors import NativeError as NativeError
from .errors import PeerLostError as PeerLostError
from .errors import SchemaError as SchemaError
from .errors import TransferFailed as TransferFailed
from .errors import TransferTimeout as TransferTimeout
from .errors import UnavailableError as UnavailableError
from .errors import VersionError as VersionError
from .errors import WireError as WireError
from .ledger import Ledger as Ledger
from .link import Allocation as Allocation
from .link import KVLink as KVLink
from .link import PutStream as PutStream
from .link import Received as Received
from .link import ReceivedLayer as ReceivedLayer
from .link import ReceivedStream as ReceivedStream
from .metadata import KVMetadata as KVMetadata
from .paged import Paged as Paged
from .paged import Pages as Pages
from .pools import split_packed as split_packed
from .pools import split_stacked as split_stacked
from .schema import KVCacheTransferData as KVCacheTransferData
