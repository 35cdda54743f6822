"""The inputs of a request: its prompt, and the tensors and values of its sampling params."""
