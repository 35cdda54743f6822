"""Copiers: the one copy, from the engine's tensors into the transport's memory."""

from omni_kvlink.copier.base import Copier as Copier
from omni_kvlink.copier.base import GatherHandle as GatherHandle
from omni_kvlink.copier.native import NativeCopier as NativeCopier
from omni_kvlink.copier.pinned import PinnedCopier as PinnedCopier
from omni_kvlink.copier.select import COPIER as COPIER
from omni_kvlink.copier.select import fastest_copier as fastest_copier
from omni_kvlink.copier.select import named_copier as named_copier
from omni_kvlink.copier.streams import CurrentStreams as CurrentStreams
from omni_kvlink.copier.streams import StreamEvents as StreamEvents
from omni_kvlink.copier.torch_copier import TorchCopier as TorchCopier
