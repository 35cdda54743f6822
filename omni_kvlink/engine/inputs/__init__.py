"""What a request brings: its prompt, and the tensors and values of its sampling params."""
