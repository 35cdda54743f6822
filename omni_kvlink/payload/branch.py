"""Re-exports for modules that do not import from `manifest` yet."""

from omni_kvlink.payload.manifest import DTYPES as DTYPES
from omni_kvlink.payload.manifest import KV_DTYPES as KV_DTYPES
from omni_kvlink.payload.manifest import Branch as Branch
from omni_kvlink.payload.manifest import Count as Count
from omni_kvlink.payload.manifest import Shard as Shard
