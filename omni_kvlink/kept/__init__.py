"""Payloads that are kept for any number of readers: `put(data, readers=None)`, and their keys."""

from omni_kvlink.kept.identity import CacheIdentity

__all__ = ["CacheIdentity"]
