"""Lookup by token prefix in a campaign: links of their own between the same processes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import KVCacheTransferData, KVLink
from omni_kvlink.lookup import LookupConsumer, LookupProducer, PrefixStore
from omni_kvlink.testing.caches import hash_tensors
from support.network.features import prompt_of, recipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_kvlink.lookup import Match

MODEL = "campaign"
BUDGET = 64 << 20
CONNECT = 60.0


def connected(urls: Mapping[str, str], peer: str, options: dict[str, Any]) -> LookupConsumer:
    """The reader's side: serves its questions, and waits for the producer."""
    questions = KVLink.serve(urls[peer], **options)
    answers = KVLink.connect(urls["P"], timeout=CONNECT, **options)
    return LookupConsumer(questions, [answers], model=MODEL)


class Lookups:
    """The producer's side: a store whose prompts the readers look up; a context manager."""

    def __init__(self, urls: Mapping[str, str], incarnation: int, options: dict[str, Any]):
        self._incarnation, self._options = incarnation, options
        self._store = PrefixStore(KVLink.serve(urls["P"], **{**options, "quota": BUDGET}))
        self._producer = LookupProducer(self._store, model=MODEL)
        readers = [url for peer, url in urls.items() if peer != "P"]
        self._threads = [threading.Thread(target=self._listen, args=(url,)) for url in readers]
        for thread in self._threads:
            thread.start()

    def insert(self, key: str) -> None:
        """Store the cache of a key under the tokens of its prompt."""
        data = recipe(key, self._incarnation).make()
        assert isinstance(data, KVCacheTransferData)
        blocks, extra = data.layer_blocks, data.metadata.extra
        keys = [view for view in blocks["key_cache"] if view is not None]
        values = [view for view in blocks["value_cache"] if view is not None]
        hidden = torch.zeros(1, 8)  # so that the last token is found, too
        self._store.insert(prompt_of(key), None, keys, values, hidden, extra=extra)

    def __enter__(self) -> Lookups:
        return self

    def __exit__(self, *exception: object) -> None:
        for thread in self._threads:
            thread.join()
        self._producer.close()

    def _listen(self, url: str) -> None:
        self._producer.listen(KVLink.connect(url, timeout=CONNECT, **self._options))


def incarnation_of(match: Match, key: str) -> int:
    """The incarnation of the producer whose cache was found; -1 if it is another one's."""
    data = match.data
    if data is None or not match.is_complete:
        return -1
    incarnation = (int(data.metadata.extra["seed"]) - 1) // 1000
    expected = hash_tensors(recipe(key, incarnation).make().tensors())
    return incarnation if hash_tensors(data.tensors()) == expected else -1
