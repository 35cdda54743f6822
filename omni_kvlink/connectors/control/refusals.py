"""Why a control channel refuses peers, and what they are told of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import zmq

from omni_kvlink.connectors.protocol.messages import (
    PROTOCOL,
    Hello,
    Refused,
    common_version,
    encode,
    shorten,
)
from omni_kvlink.connectors.protocol.path import path_refusal

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from omni_kvlink.connectors.control.address import ControlAddress
    from omni_kvlink.connectors.control.monitored_socket import Buffer
    from omni_kvlink.connectors.protocol.path import LinkPath

_log = logging.getLogger("omni_kvlink")

MAX_PEERS = 1024


class Refusals(dict[bytes, str]):
    """Peers that are still to be told why they are refused; `refused` has all, by reason.

    A ROUTER cannot close a connection, so each is told to disconnect; one that takes no message now
    is told later.
    """

    def __init__(
        self,
        refused: Counter[str],
        send: Callable[[list[Buffer]], object],
        address: ControlAddress,
        require: Sequence[str],
    ):
        super().__init__()
        self._refused, self._send, self._require = refused, send, require
        self._url, self._is_auto = address.url, address.scheme == "auto"

    def refuse(self, identity: bytes, reason: str) -> None:
        """Tell a peer, now or later."""
        self[identity] = reason
        self.send()

    def send(self) -> None:
        """Tell those that wait; with the listener's lock held."""
        for identity, reason in list(self.items()):
            try:
                self._send([identity, encode(Refused(shorten(reason), PROTOCOL))])
            except zmq.Again:
                continue
            except zmq.ZMQError:
                pass  # it has disconnected
            del self[identity]

    def find(self, hello: Hello, num_peers: int, paths: Sequence[LinkPath]) -> str:
        """Return why a peer with this `Hello` is refused, and count it; or "".

        `num_peers` are connected already; it may have one of these `paths`.
        """
        if common_version(hello.versions) is None:
            self._refused["other version"] += 1
            return "no common version"
        if num_peers >= MAX_PEERS:
            self._refused["too many"] += 1
            return f"{MAX_PEERS} readers are connected already"
        if self._is_auto:
            return ""  # it chooses its path now; one without any is refused with its first request
        require = {*self._require, *(hello.require or ())}
        reasons = [path_refusal(path, require) for path in paths]
        if not all(reasons):
            return ""
        self._refused["path"] += 1
        _log.warning("a reader of %s has no path as required: %s", self._url, reasons[0])
        return reasons[0]
