"""Former home of the slot functions; import them from `protocol.messages`."""

from omni_kvlink.connectors.protocol.messages import SLOT, holds, write_head

__all__ = ["SLOT", "holds", "write_head"]
