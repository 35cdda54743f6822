"""Who may talk to whom over a network, and that nobody else can listen: CURVE."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import zmq

from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.control.keys import read_all, read_public, read_secret
from omni_kvlink.connectors.runtime.event_loop import READ, EventLoop
from omni_kvlink.errors import ConnectorError

_DOMAIN = b"kvlink"
_ZAP = "inproc://zeromq.zap.01"  # the address is ZMQ's own, one in each context


def check_exposure(endpoint: ControlAddress, options: Options) -> None:
    """Nothing goes over a network unprotected, unless somebody insists.

    Raises:
        ConnectorError: another machine could read or send, and no keys are given.
    """
    if bool(options.keys) != bool(options.peers):
        raise ConnectorError(
            f"{endpoint.url}: keys= (this side's secret key) and peers= (who the other side may "
            "be) go together"
        )
    if endpoint.is_local or options.keys:
        return
    if not options.insecure:
        raise ConnectorError(
            f"{endpoint.url} is open to other machines: give keys= and peers= (`kvlink-bench "
            "keygen` makes them), use 127.0.0.1, or say insecure=True if the network is trusted"
        )
    warnings.warn(
        f"{endpoint.url} is INSECURE: whoever reaches it can read every payload",
        RuntimeWarning,
        stacklevel=2,
    )


def protect_server(socket: zmq.Socket[bytes], options: Options) -> None:
    """Encrypt, and let nobody in whom the gate does not know."""
    if options.keys:
        read_all(options.peers)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, read_secret(options.keys))
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


def protect_client(socket: zmq.Socket[bytes], options: Options) -> None:
    """Encrypt, and talk to the one producer that has the key."""
    if options.keys:
        secret = read_secret(options.keys)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
        socket.setsockopt(zmq.CURVE_SERVERKEY, read_public(options.peers))


class ZapAuth:
    """Answers ZMQ's question whether a client may come in: if its key lies in the directory now.

    Args:
        directory: of the public keys; read at each question, so that a key can be added or removed.
        refused: told of each client that was not let in.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        directory: str,
        loop: EventLoop,
        refused: Callable[[], None],
    ):
        self._directory, self._loop, self._refused = directory, loop, refused
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)

    def watch(self) -> None:
        self._loop.watch(self._socket.FD, READ, self.drain)
        self.drain()

    def drain(self, events: int = 0) -> None:
        while not self._socket.closed:
            try:
                asked = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            version, number = asked[0], asked[1]
            is_known = self._knows(asked)
            if not is_known:
                self._refused()
            verdict = (b"200", b"OK") if is_known else (b"400", b"not on the list")
            self._socket.send_multipart([version, number, *verdict, b"", b""], zmq.DONTWAIT)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.unwatch(self._socket.FD)
            self._socket.close(0)

    def _knows(self, asked: list[bytes]) -> bool:
        """The question: version, number, domain, address, identity, mechanism, credentials."""
        if len(asked) != 7 or (asked[2], asked[5]) != (_DOMAIN, b"CURVE"):
            return False
        try:
            return asked[6] in read_all(self._directory)
        except ConnectorError:
            return False
