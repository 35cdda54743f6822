"""Examines the directories of named sockets: their rights, and sockets that nobody serves."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from omni_kvlink.connectors.runtime.user_files import check_private, default_directory, is_alive
from omni_kvlink.errors import ConnectorError

if TYPE_CHECKING:
    from omni_kvlink.doctor.findings import Area
    from omni_kvlink.doctor.inquiry import Inquiry

_MOST_NAMES = 4


def examine(area: Area, inquiry: Inquiry) -> None:
    """Add the findings of each directory; makes none."""
    with area.guarded("directory"):
        default = default_directory()
        named = {link.options.directory for link in inquiry.links() if link.uses_sockets}
        for directory in sorted({path or default for path in named or {""}}):
            with area.guarded("directory"):
                _directory(area, directory, is_default=directory == default)


def _directory(area: Area, directory: str, *, is_default: bool) -> None:
    if not os.path.lexists(directory):
        if is_default:
            area.ok("directory", f"{directory}, which the first link makes")
            return
        cure = "start the producer, which makes it, or mount it here, too: both ends need one"
        area.wrong("directory", f"there is no directory {directory}", cure)
        return
    check_private(directory)
    area.ok("directory", f"{directory}, for uid {os.geteuid()} alone")
    sockets = [path for path in sorted(Path(directory).iterdir()) if _is_socket(path)]
    dead = [path.name for path in sockets if not _answers(path)]
    if dead:
        more = f" and {len(dead) - _MOST_NAMES} more" if len(dead) > _MOST_NAMES else ""
        names = ", ".join(dead[:_MOST_NAMES]) + more
        cure = f"start the producer, which replaces it, or remove it from {directory}"
        area.wrong("stale sockets", f"{names}: nobody listens, the producer was killed", cure)
    else:
        area.ok("stale sockets", f"none, {len(sockets)} in use")


def _is_socket(path: Path) -> bool:
    return stat.S_ISSOCK(path.lstat().st_mode)


def _answers(path: Path) -> bool:
    """Whether a process listens there, over shared memory or ZMQ."""
    try:
        return is_alive(str(path), socket.SOCK_SEQPACKET)
    except ConnectorError:  # it listens for streams
        return True
