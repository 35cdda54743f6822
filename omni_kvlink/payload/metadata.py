"""Re-exports for modules that do not import from `schema` yet."""

from omni_kvlink.payload.schema import KVMetadata as KVMetadata
