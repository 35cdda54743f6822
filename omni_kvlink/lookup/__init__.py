"""Prefill and decode apart: K and V found again by the tokens that they begin with."""

from omni_kvlink.lookup.consumer import LookupConsumer as LookupConsumer
from omni_kvlink.lookup.match import Match as Match
from omni_kvlink.lookup.producer import LookupProducer as LookupProducer
from omni_kvlink.lookup.store import PrefixStore as PrefixStore
