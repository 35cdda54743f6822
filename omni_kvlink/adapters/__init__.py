"""Adapters: convert an engine's own cache to and from `KVCacheTransferData`."""

from omni_kvlink.adapters.bagel import BagelAdapter as BagelAdapter
from omni_kvlink.adapters.bagel import pack_generator as pack_generator
from omni_kvlink.adapters.bagel import unpack_generator as unpack_generator
from omni_kvlink.adapters.base import CacheAdapter as CacheAdapter
from omni_kvlink.adapters.hf import DynamicCacheAdapter as DynamicCacheAdapter
from omni_kvlink.adapters.hf import make_cache as make_cache
from omni_kvlink.adapters.paged import PagedAdapter as PagedAdapter
from omni_kvlink.adapters.paged import PagedCache as PagedCache
