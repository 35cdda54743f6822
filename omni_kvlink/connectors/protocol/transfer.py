"""Former home of `Transfer`; import it from `protocol.transfer_table`."""

from omni_kvlink.connectors.protocol.transfer_table import Claim, Peer, Transfer, TransferState

__all__ = ["Claim", "Peer", "Transfer", "TransferState"]
