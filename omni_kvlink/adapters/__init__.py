"""Adapters: an engine's own cache to and from `KVCacheTransferData`."""

from .bagel import BagelAdapter as BagelAdapter
from .bagel import pack_generator as pack_generator
from .bagel import unpack_generator as unpack_generator
from .base import CacheAdapter as CacheAdapter
from .hf import DynamicCacheAdapter as DynamicCacheAdapter
from .hf import make_cache as make_cache
from .paged import PagedAdapter as PagedAdapter
from .paged import PagedCache as PagedCache
