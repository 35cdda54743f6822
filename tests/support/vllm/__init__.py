"""vLLM's engines, and its connector stepped without a model."""
