"""Reference models: small, plain PyTorch, for the examples and the tests."""
