"""Executors: between an engine and whoever does its work."""

from .base import Executor as Executor
from .base import FailureCallback as FailureCallback
