"""Prefill and decode apart: K and V found again by the tokens that they begin with."""

from .consumer import LookupConsumer as LookupConsumer
from .match import Match as Match
from .producer import LookupProducer as LookupProducer
from .store import PrefixStore as PrefixStore
