"""A storage backend of SGLang's HiCache that keeps pages for other engines.

`module_path` of `--hicache-storage-backend-extra-config` names this.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_kvlink.integrations.sglang.backend import KVLinkHiCache as KVLinkHiCache

__all__ = ["KVLinkHiCache"]

TESTED = ("0.5.23",)
"""The versions of SGLang that the backend is tested with."""


def __getattr__(name: str) -> Any:
    """Import the backend when it is first used: SGLang need not be installed before."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.backend"), name)
