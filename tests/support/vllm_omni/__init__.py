"""vLLM-Omni's stages, and what they exchange."""
