"""The yardsticks of `ucx://`: as many bytes by one bare ucxx tag send."""

from __future__ import annotations

import time

import numpy as np

from omni_kvlink.bench.bare_ucx import PLAIN, Bare
from omni_kvlink.bench.raw_tcp import Told
from omni_kvlink.connectors.ucx.settings import UcxSettings

_PATIENCE = 60.0


class Sender:
    """Sends from a warm buffer to a `Receiver` in the reader's process."""

    def __init__(self, peer: Told, name: str, nbytes: int, *, plain: bool):
        self._peer, self._name = peer, name
        self._bare = Bare(np.ones(nbytes, np.uint8), _options(plain))
        address = self._bare.address
        peer.tell(do="raw_ucx_open", name=name, address=address, nbytes=nbytes, plain=plain)
        self._bare.meet(peer.answer(timeout=_PATIENCE)["address"])

    def seconds(self) -> float:
        """From the sending to the last byte's arrival."""
        self._peer.tell(do="raw_receive", name=self._name)
        started = time.monotonic_ns()
        self._bare.send()
        return 1e-9 * (int(self._peer.answer(timeout=_PATIENCE)["received"]) - started)

    def close(self) -> None:
        self._bare.close()


class Receiver:
    """Receives to a warm buffer."""

    def __init__(self, address: str, nbytes: int, *, plain: bool):
        self._bare = Bare(np.zeros(nbytes, np.uint8) + np.uint8(1), _options(plain))
        self._bare.meet(address)
        self.address = self._bare.address

    def receive(self) -> int:
        """Take everything; the moment of the last byte, in monotonic nanoseconds."""
        self._bare.receive()
        self._bare.wait()
        return time.monotonic_ns()

    def close(self) -> None:
        self._bare.close()


def _options(plain: bool) -> dict[str, str]:
    """As UCX sets itself up, or as the plane is."""
    return PLAIN if plain else UcxSettings().options()
