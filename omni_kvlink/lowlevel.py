"""Calls below `KVProducer` and `KVConsumer`: for event loops, integrations and engines.

Stable and documented like the rest of the public API. Application code needs none of it.

A get without a waiting thread: `begin_get` sends the request; wait for `PendingGet.future` in any
event loop; `PendingGet.wait(timeout=0.0)` then returns the `Delivery` or raises its error, and
`open_delivery` checks the payload and makes views of it. After PeerLostError, `can_retry` says
whether to call `begin_get` again. A `Delivery` that is neither opened nor released keeps memory of
the producer. `BackgroundGet` does all this, with a deadline and a cancel, and runs the copy in a
thread pool.

| names | for |
|---|---|
| `begin_get`, `can_retry`, `open_delivery`, `open_stream` | gets that hold no thread |
| `begin_gets` | several at once |
| `begin_chunks`, `open_chunks` | the same for append streams |
| `PendingGet`, `Delivery` | what they return |
| `BackgroundGet`, `GetPhase` | one get with a deadline that no thread waits for |
| `CopyInto`, `LayerTargets` | its copy into tensors of the caller, or layers of it |
| `LazyEvent` | an event whose wait an interrupt may cut at any line |
| `inspect_producer`, `ProducerReport`, `LivePayload` | what a live producer keeps, for its owner |
| `Options`, `ServeOptions`, `ConnectOptions`, `LinkUrl`, `Device` | settings of a configuration |
| `backend`, `check_verify` | validate a configuration before a link is opened |
| `check_request_id` | validate a key that a client chose |
| `check_private`, `default_directory` | directories of this user |
| `LockFile`, `WakeupFifo`, `wake`, `wait_readable` | who serves at a path, and who waits for it |
| `Copier`, `GatherHandle`, `TorchCopier` | base classes of a copier of one's own |
| `StreamEvents`, `CurrentStreams`, `named_copier` | copies in the order of CUDA streams |
| `ArenaPool`, `Block`, `Mapping`, `Region`, `is_sealed`, `byte_tensor` | shared memory |
| `Manifest`, `dtype_name`, `write` | a payload's layout, dtypes, blocks |
"""

from omni_kvlink.connectors.base import Device as Device
from omni_kvlink.connectors.base import Options as Options
from omni_kvlink.connectors.base import PendingGet as PendingGet
from omni_kvlink.connectors.protocol.delivery import Delivery as Delivery
from omni_kvlink.connectors.protocol.messages import LivePayload as LivePayload
from omni_kvlink.connectors.registry import backend as backend
from omni_kvlink.connectors.runtime.user_files import LockFile as LockFile
from omni_kvlink.connectors.runtime.user_files import WakeupFifo as WakeupFifo
from omni_kvlink.connectors.runtime.user_files import check_private as check_private
from omni_kvlink.connectors.runtime.user_files import default_directory as default_directory
from omni_kvlink.connectors.runtime.user_files import wait_readable as wait_readable
from omni_kvlink.connectors.runtime.user_files import wake as wake
from omni_kvlink.copier import Copier as Copier
from omni_kvlink.copier import CurrentStreams as CurrentStreams
from omni_kvlink.copier import GatherHandle as GatherHandle
from omni_kvlink.copier import StreamEvents as StreamEvents
from omni_kvlink.copier import TorchCopier as TorchCopier
from omni_kvlink.copier import named_copier as named_copier
from omni_kvlink.link import BackgroundGet as BackgroundGet
from omni_kvlink.link import ConnectOptions as ConnectOptions
from omni_kvlink.link import CopyInto as CopyInto
from omni_kvlink.link import GetPhase as GetPhase
from omni_kvlink.link import LayerTargets as LayerTargets
from omni_kvlink.link import LinkUrl as LinkUrl
from omni_kvlink.link import ProducerReport as ProducerReport
from omni_kvlink.link import ServeOptions as ServeOptions
from omni_kvlink.link import begin_chunks as begin_chunks
from omni_kvlink.link import begin_get as begin_get
from omni_kvlink.link import begin_gets as begin_gets
from omni_kvlink.link import can_retry as can_retry
from omni_kvlink.link import check_verify as check_verify
from omni_kvlink.link import inspect_producer as inspect_producer
from omni_kvlink.link import open_chunks as open_chunks
from omni_kvlink.link import open_delivery as open_delivery
from omni_kvlink.link import open_stream as open_stream
from omni_kvlink.memory.arena import ArenaPool as ArenaPool
from omni_kvlink.memory.block import Block as Block
from omni_kvlink.memory.mapping import Mapping as Mapping
from omni_kvlink.memory.mapping import is_sealed as is_sealed
from omni_kvlink.memory.region import Region as Region
from omni_kvlink.payload.manifest import Manifest as Manifest
from omni_kvlink.payload.schema import check_request_id as check_request_id
from omni_kvlink.payload.tensor_memory import byte_tensor as byte_tensor
from omni_kvlink.payload.tensor_memory import dtype_name as dtype_name
from omni_kvlink.payload.views import write as write
from omni_kvlink.system.waits import LazyEvent as LazyEvent
