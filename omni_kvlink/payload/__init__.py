"""The content of a transfer: KV caches and tensors, and the header that describes them."""
