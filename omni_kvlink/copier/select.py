"""Selects a copier: the fastest one of this machine, or one by name."""

from __future__ import annotations

import warnings

import torch

from omni_kvlink._native import cuda, host
from omni_kvlink.copier.base import Copier
from omni_kvlink.copier.native import NativeCopier
from omni_kvlink.copier.pinned import PinnedCopier
from omni_kvlink.copier.torch_copier import TorchCopier
from omni_kvlink.settings import Choice

_COPIERS: dict[str, type[Copier]] = {
    copier.name: copier for copier in (PinnedCopier, NativeCopier, TorchCopier)
}
COPIER = Choice("auto", *_COPIERS)
"""The names that a setting may have."""
_has_warned = False


def fastest_copier() -> Copier:
    """Return the fastest copier that works on this machine.

    The pinned copier if torch has CUDA, there is a device and the CUDA library was built; else the
    native copier. Without the native library it is torch's, and one `RuntimeWarning` per process
    says why and what helps.
    """
    global _has_warned
    reason = host.missing()
    if reason is None:
        has_cuda = torch.version.cuda is not None and torch.cuda.is_available()
        if has_cuda and not (cuda.missing() or cuda.no_device()):
            return PinnedCopier()
        return NativeCopier()
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"{reason}. Copies are made by torch: the same bytes, more slowly",
            RuntimeWarning,
            stacklevel=2,
        )
    return TorchCopier()


def named_copier(copier: str | Copier) -> Copier:
    """Return the copier named "auto" (see `fastest_copier`), "pinned", "native" or "torch".

    A `Copier` is returned as it is. Raises NativeError if the named copier cannot be used here, and
    SchemaError if there is none of this name.
    """
    if isinstance(copier, Copier):
        return copier
    name = COPIER.read(copier, "copier")
    return fastest_copier() if name == "auto" else _COPIERS[name]()
