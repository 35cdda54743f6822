"""Executors: run what a scheduler chose, in this process or in others."""

from omni_kvlink.engine.executor.base import Executor as Executor
from omni_kvlink.engine.executor.base import FailureCallback as FailureCallback
