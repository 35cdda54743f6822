"""Models for the engine, named by the table in `worker.model`."""
