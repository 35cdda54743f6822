"""Former home of `Progress`; import it from `protocol.get_table`."""

from omni_kvlink.connectors.protocol.get_table import Progress

__all__ = ["Progress"]
