"""What UCX may open for a link: nothing to other machines, unless the link itself goes there."""

from __future__ import annotations

from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.protocol.fetch_plan import FetchLimits
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.errors import ConnectorError

LOOPBACK = "lo"
PACE = FetchLimits(256 << 20, 512 << 20)
"""One message is fastest. It takes no memory on its way; with two of them nothing waits in between,
and UCX lets a small one overtake."""


def endpoint_of(address: str) -> ControlAddress:
    """Where control goes."""
    return ControlAddress("tcp", address, "ucx")


def settings_of(endpoint: ControlAddress, options: Options) -> UcxSettings:
    """Keys and `insecure` were checked: they are what lets control out of this machine.

    Raises:
        ConnectorError: it would be open to others than the link is, or reach nobody.
    """
    devices = options.ucx_devices
    if endpoint.is_local and devices not in ("", LOOPBACK):
        raise ConnectorError(
            f"{endpoint.url} is for this machine alone, ucx_devices={devices!r} is not: UCX asks "
            "nobody who he is; serve an address of the network that you trust"
        )
    if not endpoint.is_local and not devices:
        raise ConnectorError(
            f"{endpoint.url} goes to other machines: name the device by which UCX reaches them, "
            "as in ucx_devices=eth0 (`ucx_info -d` lists them); UCX neither encrypts nor asks who "
            "somebody is, so that network must be trusted"
        )
    return UcxSettings(options.ucx_tls, devices or LOOPBACK)
