"""KV of requests: sources, sinks, and what is held between them."""
