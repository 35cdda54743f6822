"""The address of a control channel: a host and a port, or a path."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
from contextlib import nullcontext
from socket import SOCK_STREAM
from typing import Any

import zmq

from omni_kvlink.connectors.runtime.user_dirs import check_private, is_alive, locked
from omni_kvlink.errors import BusyError, ConnectorError


@dataclasses.dataclass(frozen=True)
class ControlAddress:
    """Where a producer binds its control socket; a ValueError if it has another form."""

    protocol: str  # "tcp" or "ipc"
    address: str  # host:port, where port 0 lets the system choose one; or an absolute path
    scheme: str = ""  # of the link's URL; empty for `zmq+tcp` and `zmq+ipc`

    def __post_init__(self) -> None:
        try:
            self.address.encode()
        except UnicodeEncodeError:
            scheme = self.url.partition(":")[0]
            raise ValueError(f"{scheme}://{self.address!r}: ZMQ takes only UTF-8") from None
        if self.protocol == "ipc":
            if not os.path.isabs(self.address) or len(os.fsencode(self.address)) > 100:
                raise ValueError(
                    f"{self.url}: expected an absolute path of at most 100 bytes, "
                    "as in zmq+ipc:///run/user/1000/kvlink/bagel.sock"
                )
            return
        host, _, port = self.address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            scheme = self.url.partition(":")[0]
            raise ValueError(f"{self.url}: expected host:port, as in {scheme}://127.0.0.1:7000")

    @property
    def zmq_endpoint(self) -> str:
        """The address in the form that ZMQ's `bind` and `connect` take."""
        return f"{self.protocol}://{self.address}"

    @property
    def url(self) -> str:
        """The link's URL, without its options."""
        return f"{self.scheme or 'zmq+' + self.protocol}://{self.address}"

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can connect."""
        host = self.address.rpartition(":")[0].strip("[]")
        with contextlib.suppress(ValueError):
            return self.protocol == "ipc" or ipaddress.ip_address(host).is_loopback
        return host == "localhost"

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 address in brackets."""
        return self.protocol == "tcp" and self.address.startswith("[")

    def check_directory(self) -> None:
        """Create the directory of a path, or raise ConnectorError if others can enter it."""
        if self.protocol == "ipc":
            check_private(os.path.dirname(self.address), forbidden=0o077)

    def bind(self, socket: zmq.Socket[bytes]) -> str:
        """Bind a socket; return the bound address, with the port that the system chose for 0."""
        self.check_directory()
        with self._locked():
            if self.protocol == "ipc" and is_alive(self.address, SOCK_STREAM):
                raise BusyError(f"{self.url}: another producer serves this path")
            try:
                socket.bind(self.zmq_endpoint.replace("//localhost:", "//127.0.0.1:"))
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE:
                    raise BusyError(f"{self.url}: another process serves there") from None
                raise ConnectorError(f"{self.url} cannot be served: {error}") from None
            if self.protocol == "ipc":
                os.chmod(self.address, 0o600)
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode().partition("://")[2]

    def close(self, context: zmq.Context[Any]) -> None:
        """Terminate the context that bound the address, and remove its socket file.

        A socket file that another producer has bound meanwhile is left in place. One that cannot be
        removed, because no descriptor is left for the check, is replaced by the next producer.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, ConnectorError):  # the directory was removed
                stack.enter_context(self._locked())
            context.term()
            with contextlib.suppress(OSError):
                if self.protocol == "ipc" and not is_alive(self.address, SOCK_STREAM):
                    os.unlink(self.address)

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        """Lock the directory of a path: ZMQ would silently replace another process's socket."""
        return locked(os.path.dirname(self.address)) if self.protocol == "ipc" else nullcontext()
