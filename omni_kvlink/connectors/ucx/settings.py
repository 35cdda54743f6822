"""Configures UCX by arguments, so that two transports of a process may differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.connectors.protocol.fetch_plan import FetchLimits
from omni_kvlink.connectors.protocol.path import LinkPath
from omni_kvlink.errors import ConnectorError

if TYPE_CHECKING:
    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.address import ControlAddress

LOOPBACK = "lo"
_RDMA = frozenset(("rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"))
_MEMORY = frozenset(("self", "cuda_copy", "gdr_copy"))
"""Transports that carry nothing from one process to another."""
FETCH_LIMITS = FetchLimits(256 << 20, 512 << 20)
"""Large messages are fastest and need no memory in between. With two of them on their way the
connection is never idle, and UCX lets a small one overtake."""


class UcxSettings(NamedTuple):
    """The transports and devices that UCX may use.

    Args:
        transports: UCX_TLS. GPU memory needs "cuda_copy" in it, RDMA "rc".
        devices: UCX_NET_DEVICES. UCX listens on the addresses of all of these, authenticates
            nobody, and over TCP writes wherever in memory a peer tells it to.

    UCX's shared-memory transports open no port, but cannot take the place of TCP on loopback: a
    sender that is killed while it writes blocks the receiver's queue for every other sender.
    """

    transports: str = "tcp"
    devices: str = LOOPBACK

    @classmethod
    def of_link(cls, address: ControlAddress, options: Options) -> UcxSettings:
        """Return the settings of a link, whose keys were already checked by `check_access`.

        Raises ConnectorError without `trusted_network=True`, or if UCX would be open to more
        machines than the link, or could not reach the other side.
        """
        devices = options.ucx_devices
        if not options.trusted_network:
            others = "every user of this machine" if address.is_local else "all of that network"
            cure = "shm://" if address.is_local else "zmq+tcp:// with keys"
            raise ConnectorError(
                f"{address.url}: whoever reaches a port of UCX can write into this process's "
                f"memory, read payloads, and end the process; use {cure}, or pass "
                f"trusted_network=True if {others} is trusted as this process is"
            )
        if address.is_local and devices not in ("", LOOPBACK):
            raise ConnectorError(
                f"{address.url} is for this machine alone, ucx_devices={devices!r} is not: UCX "
                "authenticates nobody; serve an address of the network that you trust"
            )
        if not address.is_local and not devices:
            raise ConnectorError(
                f"{address.url} goes to other machines: name the device by which UCX reaches "
                "them, as in ucx_devices=eth0 (`ucx_info -d` lists them); UCX neither encrypts "
                "nor authenticates, so that network must be trusted"
            )
        return cls(options.ucx_tls, devices or LOOPBACK)

    @property
    def is_rdma(self) -> bool:
        """Whether UCX can use nothing but RDMA: with any other transport, it chooses by itself."""
        used = {*self.transports.split(",")} - _MEMORY
        return bool(used) and used <= _RDMA

    @property
    def path(self) -> LinkPath:
        """The path of what UCX carries, which it never encrypts."""
        why = f"UCX may use {self.transports}"
        return LinkPath("ucx", rdma=self.is_rdma, why=f"{why} and encrypts nothing")

    def options(self) -> dict[str, str]:
        """Return the options in the form that UCX takes."""
        return {
            "KEEPALIVE_INTERVAL": "1s",
            "TCP_KEEPIDLE": "1s",
            "TCP_KEEPINTVL": "1s",
            "TCP_KEEPCNT": "3",
            "TCP_CONN_NB": "y",  # an address that does not answer must not block the thread
            "TCP_SYN_CNT": "2",
            # No faster, and its messages carry an address to write to instead of a request.
            "TCP_PUT_ENABLE": "n",
            "RNDV_THRESH": "8K",  # longer messages wait at the sender until they are matched
            # Twice as fast over TCP as UCX's default; larger segments are no faster.
            "TCP_TX_SEG_SIZE": "512K",
            "TCP_RX_SEG_SIZE": "512K",
            "TLS": self.transports,
            "NET_DEVICES": self.devices,
        }
