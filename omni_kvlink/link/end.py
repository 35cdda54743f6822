"""`LinkEnd`: what the two ends of a link have in common."""

from __future__ import annotations

import atexit
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from omni_kvlink.errors import ClosedError
from omni_kvlink.memory.region import CallAtEnd
from omni_kvlink.system import process
from omni_kvlink.system.threads import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from omni_kvlink.connectors.base import Connector
    from omni_kvlink.copier import Copier, StreamEvents
    from omni_kvlink.payload.views import TensorView

_open_ends: weakref.WeakSet[LinkEnd] = weakref.WeakSet()


class LinkEnd:
    """One end of a link. The other side connects to its `url`, with the port that was chosen."""

    def __init__(self, url: str, end: Connector, copier: Copier, *, host_reason: str = ""):
        self.url = url
        self._host_reason = host_reason
        self._end = end
        end.scheme = url.partition("://")[0]
        self._copier, self._layouts = copier, end.layouts
        self._closed, self._process = False, process.current
        process.close_in_children(self)
        self._dropped = CallAtEnd.of(self, partial(_close_dropped, url, end, self._process))
        _open_ends.add(self)

    def stats(self) -> dict[str, Any]:
        """Return state and counters of this end, as JSON values.

        `device_copies` are of its copier, which other links may share: see `Copier`. `device_path`
        is "ucx" if payloads lie in a device's memory on this side, where UCX reads or writes them,
        else "host"; `device_path_reason` says on which device, or why not.
        """
        self._check_process()
        copies = self._copier.device_copies()
        device = self._end.device
        path = {
            "device_path": "ucx" if device else "host",
            "device_path_reason": f"payloads lie on {device}" if device else self._host_reason,
        }
        return {"url": self.url, **self._end.stats(), "device_copies": copies, **path}

    def record(self, views: Sequence[TensorView]) -> StreamEvents:
        """Record what the current CUDA streams of these tensors hold now.

        For `after` of `write_layer` and `begin_scatter`, where another thread than the caller
        copies these tensors. Does not block.
        """
        return self._copier.record(views)

    def close(self) -> None:
        """Refuse new calls (ClosedError), wake every waiting call and free the memory; idempotent.

        Payloads not fetched yet are lost, and their receipts say so: wait for the receipts first.
        An exception of a signal handler ends the wait for it: the link closes all the same.
        """
        self._closed = True
        if self._process.is_current:
            uninterrupted(self._close)

    def _close(self) -> None:
        self._end.close()
        self._dropped.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        """Say which end has a verb that this one lacks."""
        owner = next((kind for kind in LinkEnd.__subclasses__() if hasattr(kind, name)), None)
        cure = f": {owner.__name__} has it, the other end of the link" if owner else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{cure}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}{', closed' if self._closed else ''}>"

    def _check_process(self) -> None:
        self._process.check(f"link {self.url}")

    def _check_open(self) -> None:
        """Raise ClosedError if the link is closed, or a parent's; takes no lock.

        Every call begins with it: see docs/threads.md.
        """
        self._check_process()
        if self._closed:
            raise ClosedError(f"link {self.url} is closed")


def open_ends() -> list[LinkEnd]:
    """Return the links of this process that are open."""
    ends = (end for end in list(_open_ends) if end._process.is_current)
    return [end for end in ends if not end._closed]


def _close_dropped(url: str, end: Connector, owner: process.OwnerProcess) -> None:
    """Close a link that nobody has any more, in the process that opened it."""
    if owner.is_current:
        end.close_deferred()
        warnings.warn(f"link {url} was not closed", ResourceWarning, stacklevel=4)


@atexit.register
def _close_all() -> None:
    """Close open links while threads still run; later, a close could wait for one that is gone."""
    for end in list(_open_ends):
        if end._dropped.is_alive and end._process.is_current:  # also after an interrupted `close`
            end.close()  # no ResourceWarning: an atexit function of the owner may be about to
