"""Connectors: bytes and manifests between stages, one file or folder a transport.

The RFC's classes `OmniConnector`, `SharedMemoryConnector`, `ZMQConnector` and `UCXConnector` can be
imported from here; they are links, and live above this package, in `link/omni_connector.py`.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_LINKS = ("OmniConnector", "SharedMemoryConnector", "UCXConnector", "ZMQConnector")


def __getattr__(name: str) -> _Any:
    if name in _LINKS:  # when it is first used: a connector imports nothing above it
        return getattr(_import_module("omni_kvlink.link.omni_connector"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LINKS})
