"""What the stages of `examples/pd_transformers.py` import is imported once."""

import fork_server

fork_server.preload("transformers.models.qwen2.modeling_qwen2")
