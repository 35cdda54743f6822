"""A producer over shared memory that answers with what a test says."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.messages import Get, own_hello
from omni_kvlink.connectors.shm.rendezvous import NamedListener
from support.connectors.shm_unauthorized import Raw

if TYPE_CHECKING:
    from collections.abc import Callable


class Hostile:
    """A producer that completes the handshake and then answers the first get with `answer`."""

    def __init__(self, path: str, answer: Callable[[Raw, Get], None]):
        self._listener = NamedListener(path)
        self._listener.sock.settimeout(60)
        self._answer = answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        sock, _ = self._listener.sock.accept()
        with sock:
            peer = Raw(sock)
            peer.receive()
            peer.send(own_hello())
            get, _ = peer.receive()
            assert isinstance(get, Get)
            with contextlib.suppress(BrokenPipeError):
                self._answer(peer, get)
            peer.is_dropped()

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listener.close()
