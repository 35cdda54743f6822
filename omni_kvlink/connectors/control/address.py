"""The address of a control channel: a host and a port, or a path."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import os
import socket as sockets
import threading
from contextlib import nullcontext
from socket import SOCK_STREAM
from typing import Any

import zmq

from omni_kvlink.connectors.protocol.path import LinkPath
from omni_kvlink.connectors.runtime.user_files import (
    LockFile,
    check_private,
    default_directory,
    is_alive,
)
from omni_kvlink.errors import BusyError, ConnectorError, SchemaError
from omni_kvlink.system.failures import translate_errors

_LOOKUP_SECONDS = 0.2
"""Seconds that a call which has timed out may still take to find out that a host is unknown."""


@dataclasses.dataclass(frozen=True)
class ControlAddress:
    """The address of a producer's control socket; SchemaError if it has another form."""

    protocol: str  # "tcp" or "ipc"
    address: str  # host:port, where port 0 lets the system choose one; or an absolute path
    scheme: str = ""  # of the link's URL; empty for `zmq+tcp` and `zmq+ipc`

    def __post_init__(self) -> None:
        try:
            self.address.encode()
        except UnicodeEncodeError:
            scheme = self.url.partition(":")[0]
            raise SchemaError(f"{scheme}://{self.address!r}: ZMQ takes only UTF-8") from None
        if self.protocol == "ipc":
            if not os.path.isabs(self.address) or len(os.fsencode(self.address)) > 100:
                raise SchemaError(
                    f"{self.url}: expected an absolute path of at most 100 bytes, "
                    "as in zmq+ipc:///run/user/1000/kvlink/bagel.sock"
                )
            return
        host, _, port = self.address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            # of `auto`, the address is the option tcp
            given = f"tcp={self.address}" if self.scheme == "auto" else self.url
            start = given[: -len(self.address)] if self.address else given
            raise SchemaError(f"{given}: expected host:port, as in {start}127.0.0.1:7000")

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

    def path(self, *, is_encrypted: bool) -> LinkPath:
        """Return the path of what is sent over this channel itself."""
        return LinkPath(
            f"zmq+{self.protocol}",
            shared_kernel=self.protocol == "ipc",
            encrypted=is_encrypted and self.protocol == "tcp",
            why=f"the link's URL is {self.url.partition(':')[0]}://",
        )

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 address in brackets."""
        return self.protocol == "tcp" and self.address.startswith("[")

    def check_directory(self) -> None:
        """Create the directory of a path, or raise ConnectorError if others can enter it."""
        if self.protocol == "ipc":
            check_private(os.path.dirname(self.address), forbidden=0o077, other=self.other)

    @property
    def other(self) -> str:
        """Return the cure if the address cannot be used."""
        if self.protocol == "tcp":
            return "use another address"
        example = os.path.join(default_directory(), os.path.basename(self.address))
        return f"use a path in a directory of this user, as in zmq+ipc://{example}, on both sides"

    def unknown_host(self, timeout: float = _LOOKUP_SECONDS) -> str:
        """Return why the host has no address, with the cure; "" if it has, or that is not known.

        Blocks for the look-up, for `timeout` seconds at most.
        """
        host = self.address.rpartition(":")[0].strip("[]")
        problems = list[str]()

        def look_up() -> None:
            try:
                sockets.getaddrinfo(host, None)
            except OSError as error:
                problems.append(
                    f"the host {host!r} is not known ({error.strerror}): correct it, or add it to "
                    "/etc/hosts or the DNS"
                )

        if self.protocol == "tcp":
            thread = threading.Thread(target=look_up, name="kvlink-lookup", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread: it is not found out
                thread.start()
                thread.join(timeout)
        return next(iter(problems), "")

    def bind(self, socket: zmq.Socket[bytes]) -> str:
        """Bind a socket; return the bound address, with the port that the system chose for 0."""
        self.check_directory()
        with translate_errors(self.url, self.other), self._locked():
            if self.protocol == "ipc" and is_alive(self.address, SOCK_STREAM):
                raise BusyError(f"{self.url}: another producer serves this path")
            try:
                socket.bind(self.zmq_endpoint.replace("//localhost:", "//127.0.0.1:"))
            except zmq.ZMQError as error:
                problem = self.unknown_host() if error.errno == errno.ENODEV else ""
                if problem:
                    raise ConnectorError(f"{self.url}: {problem}") from None
                raise
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
            # The directory was removed, or another producer is about to serve the path.
            with contextlib.suppress(OSError, ConnectorError, BusyError):
                stack.enter_context(self._locked())
            context.term()
            with contextlib.suppress(OSError, ConnectorError):
                if self.protocol == "ipc" and not is_alive(self.address, SOCK_STREAM):
                    os.unlink(self.address)

    def _locked(self) -> contextlib.AbstractContextManager[object]:
        """Lock the path: ZMQ would silently replace another process's socket."""
        return LockFile(self.address) if self.protocol == "ipc" else nullcontext()
