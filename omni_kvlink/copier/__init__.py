"""Copiers: the one copy, from the engine's tensors into the transport's memory."""

from .base import Copier as Copier
from .base import Landing as Landing
from .native import NativeCopier as NativeCopier
from .native import fastest_copier as fastest_copier
from .pinned import PinnedCopier as PinnedCopier
from .torch_copier import TorchCopier as TorchCopier
