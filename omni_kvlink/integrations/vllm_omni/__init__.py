"""KV caches and stage payloads of vLLM-Omni over the links of this library.

vLLM-Omni loads `register` by itself, from the entry point in `vllm_omni.general_plugins`; a stage's
YAML then names `OmniKVLinkConnector`. A process that makes a manager by hand calls `register()`.
"""

from .connector import OmniKVLinkConnector as OmniKVLinkConnector
from .connector import register as register
from .settings import Settings as Settings
