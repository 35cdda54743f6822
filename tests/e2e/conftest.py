"""What the stages of the examples with transformers import is imported once."""

from support.processes import fork_server

fork_server.preload(
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni",
)
