"""Workers have a device and nothing else; runners have a model and run it."""
