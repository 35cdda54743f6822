"""Former home of `ShmConsumer`; import it from `shm.transport`."""

from omni_kvlink.connectors.shm.transport import ShmConsumer, ShmSession

__all__ = ["ShmConsumer", "ShmSession"]
