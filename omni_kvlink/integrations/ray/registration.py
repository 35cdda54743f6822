"""`register`: makes the transport known to Ray, with its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from omni_kvlink.errors import SchemaError, UnavailableError
from omni_kvlink.integrations.ray.settings import RaySettings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from omni_kvlink import LinkOptions


def register(
    name: str = "kvlink",
    *,
    transport: Literal["shm", "auto", "zmq+tcp", "ucx"] = "shm",
    host: str = "",
    views: bool = False,
    put_timeout: float = 10.0,
    connect_timeout: float = 3.0,
    timeout: float = 50.0,
    digests: bool = True,
    copier: str = "auto",
    **options: Unpack[LinkOptions],
) -> None:
    """Make the transport known to Ray, before the actors that use it are created.

    Ray passes it, with its settings, to each actor that this process creates. A second call with
    the same settings does nothing, also in an actor. Does not block, and opens no link.

    Args:
        name: what methods give as their `tensor_transport`.
        transport: "shm" for the actors of one machine; "auto", "zmq+tcp" or "ucx" reach others.
        host: of these, the address at which each process serves; if empty, the one by which Ray
            knows its node.
        views: receive readonly views of the link's memory in place of copies. To write to one of
            `shm` ends the process.
        put_timeout: seconds that a task may wait for memory when it returns tensors.
        connect_timeout: seconds in which the socket of a source must be reached; a source that is
            not is gone.
        timeout: seconds for the transfer of one object. Ray's own limit is 60: for more, set
            RAY_rdt_fetch_fail_timeout_milliseconds, too.
        digests: compute digests, by which readers check each byte that they copy.
        copier: see `KVLink.serve`.
        options: of all links, such as `quota`, `directory`, `keys` or `require`. `keys` is the
            secret key file of a node, beside which its public one lies, and `peers` the directory
            of the public keys of all nodes.

    Raises:
        UnavailableError: Ray is not installed, or too old; the error names the command.
        SchemaError: a setting is not valid, or the name is registered with other settings.
    """
    settings = RaySettings(
        transport=transport,
        host=host,
        views=views,
        put_timeout=put_timeout,
        connect_timeout=connect_timeout,
        timeout=timeout,
        options={"digests": digests, "copier": copier, **options},
    )
    try:
        from ray.experimental import register_tensor_transport
        from ray.experimental.rdt.util import transport_manager_info
        from torch import Tensor

        from omni_kvlink.integrations.ray.transport import KVLinkTransport
    except ImportError as error:
        raise UnavailableError(
            f"Ray's tensor transports cannot be imported ({error}): pip install 'omni-kvlink[ray]'"
        ) from error
    registered: Any = transport_manager_info.get(name.upper())
    if registered is not None:
        found = getattr(registered.transport_manager_class, "settings", None)
        if found != settings:
            raise SchemaError(f"tensor transport {name!r} is registered already, with {found}")
        return
    # A class in a function: Ray sends it to actors by its contents, and the settings with it.
    attributes = {"settings": settings, "name": name.upper()}
    configured = type("ConfiguredTransport", (KVLinkTransport,), attributes)
    register_tensor_transport(name, ["cpu"], configured, Tensor)
