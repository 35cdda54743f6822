"""CURVE encryption and authentication of a control channel."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import zmq

from omni_kvlink.connectors.control.keys import (
    files_without_key,
    read_all,
    read_public,
    read_secret,
)
from omni_kvlink.connectors.runtime.event_loop import READ, EventLoop
from omni_kvlink.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.address import ControlAddress

_DOMAIN = b"kvlink"
_ZAP = "inproc://zeromq.zap.01"  # fixed by ZMQ (RFC 27); one in each context


def check_access(address: ControlAddress, options: Options) -> None:
    """Require keys for an address that other machines can reach, and both keys or none.

    Raises ConnectorError, or with `insecure=True` warns (RuntimeWarning) of missing keys.
    """
    if bool(options.keys) != bool(options.peers):
        raise ConnectorError(
            f"{address.url}: keys= (this side's secret key) and peers= (the public keys of the "
            "other side) go together"
        )
    if address.is_local or options.keys:
        return
    if not options.insecure:
        raise ConnectorError(
            f"{address.url} is open to other machines: give keys= and peers= (`kvlink keygen` "
            "makes them), use 127.0.0.1, or pass insecure=True if the network is trusted"
        )
    warnings.warn(
        f"{address.url} is INSECURE: everybody who can reach it can read every payload",
        RuntimeWarning,
        stacklevel=2,
    )


def secure_server(socket: zmq.Socket[bytes], options: Options) -> None:
    """Make a producer's socket encrypt and authenticate, if the options name keys."""
    if options.keys:
        for problem in files_without_key(options.peers):
            text = f"{problem}; the other keys of peers={options.peers} are used"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, read_secret(options.keys))
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


def secure_client(socket: zmq.Socket[bytes], options: Options) -> None:
    """Make a consumer's socket encrypt, and accept only the producer whose key `peers` names."""
    if options.keys:
        secret = read_secret(options.keys)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
        socket.setsockopt(zmq.CURVE_SERVERKEY, read_public(options.peers))


class ZapAuth:
    """Answers the authentication requests (ZAP) of all sockets of a context, in the event loop.

    A client is admitted if its public key is in the directory when it connects: a key can be added
    or removed without a restart. `on_refused` is called for each client that was not admitted.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        directory: str,
        loop: EventLoop,
        on_refused: Callable[[], None],
    ):
        self._directory, self._loop, self._on_refused = directory, loop, on_refused
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)

    def watch(self) -> None:
        """Start answering; in the loop's thread."""
        self._loop.watch(self._socket.FD, READ, self.drain)
        self.drain()

    def drain(self, events: int = 0) -> None:
        """Answer every request that is there; in the loop's thread."""
        while not self._socket.closed:
            try:
                request = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            is_allowed = self._is_allowed(request)
            if not is_allowed:
                self._on_refused()
            verdict = (b"200", b"OK") if is_allowed else (b"400", b"not on the list")
            self._socket.send_multipart([*request[:2], *verdict, b"", b""], zmq.DONTWAIT)

    def close(self) -> None:
        """Close the socket; in the loop's thread."""
        if not self._socket.closed:
            self._loop.unwatch(self._socket.FD)
            self._socket.close(0)

    def _is_allowed(self, request: list[bytes]) -> bool:
        """A request is version, id, domain, address, identity, mechanism, and the client's key."""
        if len(request) != 7 or (request[2], request[5]) != (_DOMAIN, b"CURVE"):
            return False
        try:
            return request[6] in read_all(self._directory)
        except ConnectorError:
            return False
