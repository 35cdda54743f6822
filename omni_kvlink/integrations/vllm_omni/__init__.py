"""KV caches and stage payloads of vLLM-Omni over the links of this library.

vLLM-Omni calls `register` by itself, from the entry point in `vllm_omni.general_plugins`; a stage's
YAML then names `OmniKVLinkConnector`. A process that makes a manager by hand calls `register()`.
"""

from omni_kvlink.integrations.vllm_omni.settings import OmniSettings as OmniSettings


def register() -> None:
    """Make `OmniKVLinkConnector` known to vLLM-Omni in this process; a second call does nothing.

    Raises:
        UnavailableError: vLLM-Omni cannot be imported; names the command that installs it.
        ValueError: another connector has this name.
    """
    from omni_kvlink.integrations.vllm_omni.connector import register_connector

    register_connector()
