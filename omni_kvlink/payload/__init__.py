"""What one transfer carries: KV caches and tensors, and the header that describes them."""
