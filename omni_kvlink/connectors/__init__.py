"""Connectors: bytes and manifests between stages, one file or folder a transport."""
