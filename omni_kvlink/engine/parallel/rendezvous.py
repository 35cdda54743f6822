"""Where the ranks of a stage meet over TCP."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

_SIOCGIFADDR = 0x8915
_open: dict[str, socket.socket] = {}
"""Places that were opened here and where nobody has met yet."""


def open_meeting(address: str) -> str:
    """A place at this address, for rank 0 to hold; nobody else gets its port. Its URL.

    Raises:
        OSError: the address is not this machine's.
    """
    sock = socket.create_server((address, 0))
    url = f"tcp://{address}:{sock.getsockname()[1]}"
    _open[url] = sock
    return url


def join_meeting(url: str, rank: int, size: int) -> Any:
    """Meet the others; rank 0 serves them, at this address and no other.

    Raises:
        OSError: the address is not this machine's, or taken.
        RuntimeError: the others did not come.
    """
    place = urlsplit(url)
    if not place.hostname or not place.port:
        raise ValueError(f"{url}: wanted tcp://address:port")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_to(place.hostname))
    store = partial(TCPStore, place.hostname, place.port, size)
    if rank:
        return store(is_master=False)
    sock = _open.pop(url, None) or socket.create_server((place.hostname, place.port))
    return store(is_master=True, master_listen_fd=sock.detach())


def _interface_to(host: str) -> str:
    """By which of its interfaces this machine reaches the host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))  # sends nothing
        mine = sock.getsockname()[0]
        if ipaddress.ip_address(mine).is_loopback:
            return "lo"
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == mine:
                return name
    raise OSError(f"no interface of this machine has the address {mine}, which reaches {host}")
