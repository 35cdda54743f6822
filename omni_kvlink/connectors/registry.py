"""Connectors by URL scheme; a connector's module is imported when its scheme is first used."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from omni_kvlink.errors import SchemaError, UnavailableError
from omni_kvlink.settings import Text, shown, there_are

if TYPE_CHECKING:
    from omni_kvlink.connectors.base import Backend

GROUP = "omni_kvlink.connectors"
"""The entry-point group for connectors of other packages: `scheme = "module:BACKEND"`."""

_ROWS: dict[str, tuple[str, str]] = {
    "inproc": ("omni_kvlink.connectors.inproc:BACKEND", ""),
    "shm": ("omni_kvlink.connectors.shm:BACKEND", ""),
    "zmq+tcp": ("omni_kvlink.connectors.zmq:TCP", "pip install pyzmq"),
    "zmq+ipc": ("omni_kvlink.connectors.zmq:IPC", "pip install pyzmq"),
    "auto": ("omni_kvlink.connectors.auto:BACKEND", "pip install pyzmq"),
    "ucx": ("omni_kvlink.connectors.ucx:BACKEND", "pip install 'omni-kvlink[ucx]'"),
}


def register(scheme: str, target: str, install: str = "") -> None:
    """Add or replace a connector: its `Backend` as "module:attribute", and how to install it."""
    _ROWS[scheme] = (target, install)


def schemes() -> list[str]:
    """Return every known scheme, whether or not its connector can run here."""
    return sorted({*_ROWS, *(point.name for point in entry_points(group=GROUP))})


def is_known(scheme: str) -> bool:
    """Whether there is such a connector, be it able to run here or not."""
    return scheme in _ROWS or scheme in schemes()


def split_url(url: str) -> tuple[str, str]:
    """Return `("shm", "bagel")` of `"shm://bagel"`; SchemaError if it is not a link URL."""
    Text("shm://name").read(url, "url")
    scheme, separator, address = url.partition("://")
    if not separator or not scheme or not address:
        before, colon, after = url.partition(":")
        name = after.strip("/")
        meant = f"; did you mean {before}://{name}?" if before and colon and name else ""
        raise SchemaError(f"{shown(url)} is not a link URL; one looks like shm://name{meant}")
    return scheme, address


def backend(scheme: str) -> Backend:
    """Return the connector of a scheme.

    Raises:
        UnavailableError: it is unknown, not installed or cannot run here; the text names the cure.
    """
    target, install = _ROWS.get(scheme) or _from_entry_points(scheme)
    module, _, attribute = target.partition(":")
    try:
        found: Backend = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        cure = f"; {install}" if install else ""
        raise UnavailableError(f"connector {scheme!r} cannot be loaded: {error}{cure}") from error
    why = found.unavailable()
    if why is not None:
        raise UnavailableError(f"connector {scheme!r} cannot run here: {why}")
    return found


def _from_entry_points(scheme: str) -> tuple[str, str]:
    for point in entry_points(group=GROUP, name=scheme):
        return point.value, ""
    raise UnavailableError(f"no connector {scheme!r}{there_are(scheme, schemes())}")
