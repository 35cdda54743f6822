"""Re-exports for modules that do not import from `manifest` yet."""

from omni_kvlink.payload.manifest import ALIGN as ALIGN
from omni_kvlink.payload.manifest import MAX_HEADER as MAX_HEADER
from omni_kvlink.payload.manifest import MAX_TENSORS as MAX_TENSORS
