"""Payloads that are kept for any number of readers: their keys, and who shares them."""

from omni_kvlink.kept.client import StoreClient as StoreClient
from omni_kvlink.kept.identity import CacheIdentity as CacheIdentity
from omni_kvlink.kept.store import PayloadStore as PayloadStore
