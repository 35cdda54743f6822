"""Former home of `Listener`; import it from `runtime.producer`."""

from omni_kvlink.connectors.runtime.producer import Listener, PeerHandle

__all__ = ["Listener", "PeerHandle"]
