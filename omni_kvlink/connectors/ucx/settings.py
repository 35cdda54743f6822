"""How UCX is set up: as arguments, so that two planes of a process may differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

KEEPALIVE = {
    "KEEPALIVE_INTERVAL": "1s",
    "TCP_KEEPIDLE": "1s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
    "TCP_CONN_NB": "y",  # an address that does not answer must not block the thread
    "TCP_SYN_CNT": "2",
}
SEGMENT = "512K"
"""Twice as fast as UCX's own choice over TCP, and no faster beyond."""


@dataclasses.dataclass(frozen=True)
class UcxSettings:
    """What UCX may use.

    Args:
        transports: UCX_TLS. Memory of a GPU wants "cuda_copy" in it, RDMA "rc".
        devices: UCX_NET_DEVICES. UCX listens on the addresses of all of these, asks nobody who he
            is, and over TCP writes wherever in memory a peer tells it to: nothing but loopback,
            unless somebody says which network is trusted as this process is.
        more: other UCX options, without UCX_; they win over what is set here.
    """

    transports: str = "tcp"
    devices: str = "lo"
    more: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def options(self) -> dict[str, str]:
        """As UCX takes them."""
        return {
            **KEEPALIVE,
            # No faster, and its bytes carry an address where the others carry a request.
            "TCP_PUT_ENABLE": "n",
            "RNDV_THRESH": "8K",  # what is longer waits at its sender until it is asked for
            "TCP_TX_SEG_SIZE": SEGMENT,
            "TCP_RX_SEG_SIZE": SEGMENT,
            "TLS": self.transports,
            "NET_DEVICES": self.devices,
            **self.more,
        }
