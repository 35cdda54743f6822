"""Prefill and decode in separate processes: K and V are found by the tokens of a prompt."""

from omni_kvlink.lookup.consumer import LookupConsumer as LookupConsumer
from omni_kvlink.lookup.match import Match as Match
from omni_kvlink.lookup.producer import LookupProducer as LookupProducer
from omni_kvlink.lookup.store import PrefixStore as PrefixStore
