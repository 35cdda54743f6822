"""Former home of `ShmListener`; import it from `shm.transport`."""

from omni_kvlink.connectors.shm.transport import ShmListener

__all__ = ["ShmListener"]
