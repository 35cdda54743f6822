"""CURVE encryption and authentication of a control channel."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import warnings
from typing import TYPE_CHECKING, Any

import zmq
import zmq.utils.z85

from omni_kvlink.connectors.control.keys import (
    read_all,
    read_public,
    read_secret,
    user_key_path,
    user_secret,
)
from omni_kvlink.connectors.runtime.event_loop import READ, EventLoop
from omni_kvlink.errors import ConnectorError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.address import ControlAddress

_DOMAIN = b"kvlink"
_RANDOM_NBYTES = 256
_random_state = ctypes.create_string_buffer(_RANDOM_NBYTES)  # C may use it for ever
_ZAP = "inproc://zeromq.zap.01"  # fixed by ZMQ (RFC 27); one in each context


class Credentials:
    """The CURVE keys of one end of a control channel.

    They are the files of `keys=` and `peers=`; without these, both ends of a loopback address use
    the key pair of the user who runs them, so that other users of the machine are refused.
    """

    def __init__(self, keys: str = "", peers: str = ""):
        self._keys, self._peers = keys, peers
        self._own_public = b""

    @property
    def cure(self) -> str:
        """Return the cure if the handshake with the other side fails."""
        if self._keys:
            return "check keys= and peers= of both sides"
        return (
            f"this side uses the key of uid {os.geteuid()} in {user_key_path()}; start both sides "
            "as this user with the same XDG_RUNTIME_DIR, or give keys= and peers= to both, or "
            "insecure=True to both"
        )

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a producer's socket encrypt and authenticate."""
        for problem in read_all(self._peers)[1] if self._peers else ():
            text = f"{problem}; the other keys of peers={self._peers} are used"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        secret = self._secret()
        self._own_public = zmq.utils.z85.decode(zmq.curve_public(secret))
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a consumer's socket encrypt, and accept only the producer that `peers` names."""
        secret = self._secret()
        public = zmq.curve_public(secret)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, read_public(self._peers) if self._peers else public)

    def admitted(self) -> set[bytes]:
        """Return the public keys, 32 bytes each, of the consumers that may connect now."""
        return read_all(self._peers)[0] if self._peers else {self._own_public}

    def is_own(self, public: bytes) -> bool:
        """Whether a consumer's public key, 32 bytes, is that of this producer itself."""
        return hmac.compare_digest(public, self._own_public)

    def _secret(self) -> bytes:
        return read_secret(self._keys) if self._keys else user_secret()


def find_credentials(address: ControlAddress, options: Options) -> Credentials | None:
    """Return the keys that a link uses; None for a path, and for `insecure=True` without keys.

    Raises ConnectorError if an address that other machines can reach has no keys, or one of two.
    `insecure=True` without keys warns (RuntimeWarning).
    """
    if bool(options.keys) != bool(options.peers):
        raise ConnectorError(
            f"{address.url}: keys= (this side's secret key) and peers= (the public keys of the "
            "other side) go together"
        )
    if options.keys:
        return Credentials(options.keys, options.peers)
    if address.protocol == "ipc":
        return None
    if options.insecure:
        warnings.warn(
            f"{address.url} is INSECURE: everybody who can reach it, other users of this machine "
            "included, can read, forge and abort every payload, and end this process",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    if not address.is_local:
        raise ConnectorError(
            f"{address.url} is open to other machines: give keys= and peers= (`kvlink keygen` "
            "makes them), use 127.0.0.1, or pass insecure=True if the network is trusted"
        )
    return Credentials()


@contextlib.contextmanager
def random_routing_ids() -> Iterator[None]:
    """Have a ROUTER that is made in this block number its peers from a random number on.

    libzmq takes the first number from C's `rand`, which nobody seeds: it is the same in every
    process. A peer that claims the number of a later one as its routing id ends the process, so it
    must not be known. The sequence of `rand` goes on afterwards as if nothing had happened.
    """
    libc = ctypes.CDLL(None)
    libc.initstate.restype = ctypes.c_void_p
    libc.setstate.argtypes = [ctypes.c_void_p]
    seed = int.from_bytes(os.urandom(4), "little")
    former = libc.initstate(ctypes.c_uint(seed), _random_state, ctypes.c_size_t(_RANDOM_NBYTES))
    try:
        yield
    finally:
        libc.setstate(former)


class ZapAuth:
    """Answers the authentication requests (ZAP) of all sockets of a context, in the event loop.

    With credentials, a client is admitted if its public key is among theirs when it connects: a key
    can be added or removed without a restart. Without, every client is: libzmq still refuses those
    that speak ZMTP 1 or 2, which it does not authenticate. `refused` counts clients that were
    not admitted.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        credentials: Credentials | None,
        loop: EventLoop,
        refused: Counter[str],
    ):
        self._credentials, self._loop, self._refused = credentials, loop, refused
        # Nobody can guess it: a client may send metadata of that name itself.
        self._owner_id = os.urandom(16).hex()
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Have a producer's socket ask for every client; before it is bound."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        if self._credentials is not None:
            self._credentials.secure_server(socket)

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
            status = self._status(request)
            if status != b"200":
                self._refused["key"] += 1
            user = self._user(request) if status == b"200" else b""
            self._socket.send_multipart([*request[:2], status, b"", user, b""], zmq.DONTWAIT)

    def is_owner(self, frame: zmq.Frame) -> bool:
        """Whether the client that sent a frame has this producer's own key."""
        try:
            return frame.get("User-Id") == self._owner_id
        except zmq.ZMQError:  # libzmq knows no user id of it
            return False

    def close(self) -> None:
        """Close the socket; in the loop's thread."""
        if not self._socket.closed:
            self._loop.unwatch(self._socket.FD)
            self._socket.close(0)

    def _user(self, request: list[bytes]) -> bytes:
        """Return the user id of a client that is admitted, which its messages then have."""
        is_own = self._credentials is not None and self._credentials.is_own(request[6])
        return self._owner_id.encode() if is_own else b""

    def _status(self, request: list[bytes]) -> bytes:
        """Return ZAP's answer: 200 to admit, 400 to refuse, 300 to have the client try again.

        A request is version, id, domain, address, identity, mechanism, and the client's key.
        """
        if len(request) < 6 or request[2] != _DOMAIN:
            return b"400"
        if self._credentials is None:
            return b"200" if request[5] == b"NULL" else b"400"
        if len(request) != 7 or request[5] != b"CURVE":
            return b"400"
        try:
            return b"200" if request[6] in self._credentials.admitted() else b"400"
        except ConnectorError:  # the keys cannot be read now, say for want of a descriptor
            return b"300"
