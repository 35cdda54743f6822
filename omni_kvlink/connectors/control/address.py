"""Where a link is served: a host and a port, or a path."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
from collections.abc import Iterator
from socket import SOCK_STREAM
from typing import Any

import zmq

from omni_kvlink.connectors.runtime.user_dirs import check_private, is_alive, locked
from omni_kvlink.errors import BusyError, ConnectorError


@dataclasses.dataclass(frozen=True)
class ControlAddress:
    """An address as ZMQ takes it.

    Attributes:
        transport: "tcp" or "ipc".
        address: `host:port`, port 0 for any; or an absolute path.
        scheme: of the link's URL, if it is not ZMQ's own.
    """

    transport: str
    address: str
    scheme: str = ""

    def __post_init__(self) -> None:
        if self.transport == "ipc":
            if not os.path.isabs(self.address) or len(os.fsencode(self.address)) > 100:
                raise ValueError(
                    f"{self.url}: wanted an absolute path of at most 100 bytes, "
                    "as in zmq+ipc:///run/user/1000/kvlink/bagel.sock"
                )
            return
        host, _, port = self.address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(
                f"{self.url}: wanted host:port, as in {self.url.partition(':')[0]}://127.0.0.1:7000"
            )

    @property
    def text(self) -> str:
        return f"{self.transport}://{self.address}"

    @property
    def url(self) -> str:
        return f"{self.scheme or 'zmq+' + self.transport}://{self.address}"

    @property
    def is_local(self) -> bool:
        """Whether nothing of it leaves this machine."""
        if self.transport == "ipc":
            return True
        host = self.address.rpartition(":")[0].strip("[]")
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def is_ipv6(self) -> bool:
        return self.transport == "tcp" and self.address.startswith("[")

    def bind(self, socket: zmq.Socket[bytes]) -> str:
        """Serve there; the address it became.

        Raises:
            BusyError: another process serves there.
            ConnectorError: it cannot be served there.
        """
        with self._alone():
            if self.transport == "ipc" and is_alive(self.address, SOCK_STREAM):
                raise BusyError(f"{self.url}: another producer serves this path")
            try:
                socket.bind(self.text.replace("//localhost:", "//127.0.0.1:"))
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE:
                    raise BusyError(f"{self.url}: another process serves there") from None
                raise ConnectorError(f"{self.url} cannot be served: {error}") from None
            if self.transport == "ipc":
                os.chmod(self.address, 0o600)
        bound_url = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound_url, bytes)
        return bound_url.rstrip(b"\0").decode().partition("://")[2]

    def leave(self, context: zmq.Context[Any]) -> None:
        """End the context that served there; the socket's file goes, but not a successor's."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):  # somebody cleared the directory away
                stack.enter_context(self._alone(make=False))
            context.term()
            if self.transport == "ipc" and not is_alive(self.address, SOCK_STREAM):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.address)

    @contextlib.contextmanager
    def _alone(self, *, make: bool = True) -> Iterator[None]:
        """One process at a time: ZMQ would silently take a path from who serves it."""
        if self.transport != "ipc":
            yield
            return
        directory = os.path.dirname(self.address)
        if make:
            check_private(directory, forbidden=0o077)
        with locked(directory):
            yield
