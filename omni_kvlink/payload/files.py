"""Re-exports for modules that do not import from `bundle` yet."""

from omni_kvlink.payload.bundle import open_payload as open_payload
