"""Executors: between an engine and whoever does its work."""

from omni_kvlink.engine.executor.base import Executor as Executor
from omni_kvlink.engine.executor.base import FailureCallback as FailureCallback
