"""`OmniConnector`: the RFC's connector, a link with `put` and `get` under the RFC's names.

    from omni_kvlink.connectors import SharedMemoryConnector

    connector = SharedMemoryConnector("shm://bagel", "producer")   # the AR stage
    connector.put(data)
    connector = SharedMemoryConnector("shm://bagel", "consumer")   # the DiT stage
    with connector.get("request-1", timeout=30) as received: ...

A connector opens one end of a link; `connector.link` is that `KVProducer` or `KVConsumer`, with all
that they can do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from omni_kvlink.connectors.registry import schemes, split_url
from omni_kvlink.errors import SchemaError
from omni_kvlink.link.consumer import KVConsumer
from omni_kvlink.link.kvlink import KVLink
from omni_kvlink.link.producer import KVProducer

if TYPE_CHECKING:
    from typing_extensions import Self

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link.consumer import Received
    from omni_kvlink.payload.bundle import Payload

Role = Literal["producer", "consumer"]


class OmniConnector:
    """One end of a link over any scheme; thread-safe; a context manager that closes it.

    Args:
        url: the link's, as for `KVLink.serve`.
        role: "producer" for the stage that sends, "consumer" for the one that receives.
        timeout: seconds in which a consumer waits here for the producer; a producer waits for none.
        options: those of `KVLink.serve` or `KVLink.connect`.

    Raises:
        SchemaError: another role, a URL of another connector, or an option that is not valid.
        KVLinkError: what `KVLink.serve` and `KVLink.connect` raise.
    """

    _schemes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, url: str, role: Role, *, timeout: float = 60.0, **options: Any):
        scheme, _ = split_url(url)
        allowed = self._schemes or tuple(schemes())
        if scheme not in allowed:
            names = " or ".join(f"{name}://" for name in allowed)
            raise SchemaError(f"{type(self).__name__}: url={url}: a URL that begins with {names}")
        self.link: KVProducer | KVConsumer
        if role == "producer":
            self.link = KVLink.serve(url, **options)
        elif role == "consumer":
            self.link = KVLink.connect(url, timeout=timeout, **options)
        else:
            raise SchemaError(f"role={role!r}: 'producer' or 'consumer'")

    def put(self, data: Payload, **how: Any) -> Receipt:
        """Send a payload under its request id; blocks while it is copied. As `KVProducer.put`."""
        if not isinstance(self.link, KVProducer):
            raise SchemaError(f"put: {self.link!r} receives; the producer has it")
        return self.link.put(data, **how)

    def get(self, request_id: str, *, timeout: float, **how: Any) -> Received:
        """Receive a payload; blocks for up to `timeout` seconds. As `KVConsumer.get`."""
        if not isinstance(self.link, KVConsumer):
            raise SchemaError(f"get: {self.link!r} sends; a consumer has it")
        return self.link.get(request_id, timeout=timeout, **how)

    def close(self) -> None:
        """Close the link; idempotent."""
        self.link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.link!r}>"


class SharedMemoryConnector(OmniConnector):
    """An `OmniConnector` over shared memory of one machine: `shm://name`."""

    _schemes = ("shm",)


class ZMQConnector(OmniConnector):
    """An `OmniConnector` over ZMQ: `zmq+tcp://host:port`, `zmq+ipc://path`."""

    _schemes = ("zmq+tcp", "zmq+ipc")


class UCXConnector(OmniConnector):
    """An `OmniConnector` over UCX, RDMA included: `ucx://host:port`."""

    _schemes = ("ucx",)
