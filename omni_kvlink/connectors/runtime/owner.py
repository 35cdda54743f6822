"""The process at the other end of a Unix socket: its user, and whether that owns this one."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
_OVERFLOW_UID, _ALL_UIDS = 65534, (1 << 32) - 1


def peer_identity(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, as the kernel recorded them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def is_ambiguous(uid: int) -> bool:
    """Return whether this uid stands for every user that this user namespace does not map."""
    try:
        with open("/proc/sys/kernel/overflowuid") as file:
            if uid != int(file.read()):
                return False
        with open("/proc/self/uid_map") as file:
            return sum(int(line.split()[2]) for line in file) < _ALL_UIDS
    except OSError:  # no /proc
        return uid == _OVERFLOW_UID


def owner_refusal(uid: int) -> str:
    """Return why a process of this uid has not the rights of this one's owner; "" if it has.

    The owner's are the user of this process and root. Those whom `allow_uids` lets read have not.
    """
    own = os.geteuid()
    if uid == 0 or (uid == own and not is_ambiguous(uid)):
        return ""
    return f"uid {uid} is not its owner: inspect it as uid {own}, or as root"
