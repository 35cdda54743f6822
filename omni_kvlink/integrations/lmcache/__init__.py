"""An L2 adapter of LMCache that keeps chunks for other engines: `module_path` names this."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_kvlink.integrations.lmcache.adapter import KVLinkL2Adapter as KVLinkL2Adapter
    from omni_kvlink.integrations.lmcache.adapter import (
        KVLinkL2AdapterConfig as KVLinkL2AdapterConfig,
    )

__all__ = ["KVLinkL2Adapter", "KVLinkL2AdapterConfig"]

TESTED = ("0.5.6",)
"""The versions of LMCache that the adapter is tested with."""


def __getattr__(name: str) -> Any:
    """Import the adapter when it is first used: LMCache need not be installed before."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.adapter"), name)
