"""Former home of `Ledger`; import it from `connectors.protocol.transfer_table`."""

from omni_kvlink.connectors.protocol.transfer_table import Ledger

__all__ = ["Ledger"]
