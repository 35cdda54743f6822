"""Ownership of memory: mappings, regions, leases, and the pool that reuses them."""
