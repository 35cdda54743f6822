"""Sends KV caches and stage payloads of vLLM-Omni over the links of this library.

vLLM-Omni calls `register` through the entry point `vllm_omni.general_plugins`; a stage's YAML then
names `OmniKVLinkConnector`. A process that makes a connector manager itself calls `register()`.
"""

import functools

from omni_kvlink.integrations.vllm_omni.settings import OmniSettings as OmniSettings

TESTED = ("0.30",)
"""The releases of vLLM-Omni that the connector is tested with."""


@functools.cache
def register() -> None:
    """Register `OmniKVLinkConnector` with vLLM-Omni in this process; a second call does nothing.

    Raises:
        UnavailableError: vLLM-Omni cannot be imported; the error names the command to install it.
        ValueError: another connector is registered under this name.
    """
    from omni_kvlink.integrations.vllm_omni import connector

    name = "OmniKVLinkConnector"
    connector.OmniConnectorFactory.register_connector(name, connector.VllmOmniConnector)
