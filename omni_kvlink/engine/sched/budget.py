"""Moved to `omni_kvlink.engine.kv.budget`."""

from omni_kvlink.engine.kv.budget import Budget as Budget
