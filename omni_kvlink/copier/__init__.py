"""Copiers: the one copy, from the engine's tensors into the transport's memory."""

from .base import Copier as Copier
from .torch_copier import TorchCopier as TorchCopier
