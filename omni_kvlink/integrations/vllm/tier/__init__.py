"""The secondary tier of vLLM's tiered offloading whose chunks are kept payloads."""
