"""What a campaign transfers: features of the library, and the payloads of each key.

A key is `feature.task.number`: keys of one task are put and received together. Bytes follow from
the key and the producer's incarnation, so that every process knows what must arrive.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVCacheBundle, TensorTransferData
from omni_kvlink.testing.caches import Recipe, Tensors, chunk, sized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_kvlink import Payload

SIZES = (2_000, 40_000, 300_000, 1_500_000)
"""Bytes of payloads: inline, in one piece, in several."""
FEATURES = {
    "small": 1,
    "put": 1,
    "bundle": 1,
    "scatter": 1,
    "into": 1,
    "background-into": 1,
    "many": 3,
    "allocate": 1,
    "direct": 1,
    "encoded": 1,
    "layers": 1,
    "stream": 1,
    "requests": 1,
    "streams": 3,
    "aio": 1,
    "aio-into": 1,
    "aio-many": 3,
    "aio-layers": 1,
    "aio-stream": 1,
    "lookup": 1,
    "kept": 3,
}
"""The number of keys of a task of each feature.

`small`, `put`, `bundle`: `put` and `get` of payloads inside offers, of all sizes, and of many
tensors. `scatter`: received into the reader's own tensors; `into`: by `get(into=)`, of what was put
whole and of what is written layer by layer; `background-into`: by `BackgroundGet`, in a pool, and
cancelled at any moment. `many`: `put_many`, `get_many`.
`allocate`, `direct`: put without a copy. `encoded`: header and tensors as they are, by a replay.
`layers`: `stream_put`, `stream_get`, and the metadata at the end. `stream`: an append stream, from
`open_stream` to `read_stream`; `requests`: of many requests in each chunk; `streams`: three, in one
thread (`ChunkStreams`). `aio`: the reader awaits. `lookup`: by tokens. `kept`: two payloads
that each reader gets again and again, and one of so many readers; at its end they are withdrawn.
"""
GROWING = ("stream", "requests", "streams", "aio-stream")
PLAIN = ("put",)
"""What any system can do that has `put` and `get`."""
MOST_CHUNKS = 8
LAYERS = 4
REQUESTS = ("one", "two")
TOKENS = 9
"""Tokens of a prompt that is looked up."""


def runs_over(feature: str, scheme: str) -> bool:
    """Whether a connector has a feature: shared memory is sent from the link's memory only."""
    return feature != "direct" or scheme in ("zmq+ipc", "zmq+tcp", "ucx")


def names(features: Sequence[str], keys: int, rng: random.Random) -> Iterator[str]:
    """At least so many keys, whose tasks are of these features in random order."""
    number = 0
    while number < keys:
        feature = rng.choice(features)
        task = number
        for number in range(task, task + FEATURES[feature]):
            yield f"{feature}.{task}.{number}"
        number += 1


def feature_of(key: str) -> str:
    return key.partition(".")[0]


def is_kept(key: str) -> bool:
    """Whether a payload is put for any number of readers."""
    feature, *numbers = key.split(".")
    return feature == "kept" and int(numbers[1]) - int(numbers[0]) < FEATURES[feature] - 1


def number_of(key: str) -> int:
    return int(key.rpartition(".")[2])


def recipe(key: str, incarnation: int) -> Recipe:
    """Return a payload whose bytes differ for each incarnation of the producer."""
    number, feature = number_of(key), feature_of(key)
    seed = 1 + 1000 * incarnation + number
    if feature == "bundle":
        return Recipe(key, seed, bundle=number % 2 == 0, tokens=40 + number, tensors=True)
    if feature == "lookup":
        return Recipe(key, seed, tokens=TOKENS)
    nbytes = SIZES[0] if feature == "small" else SIZES[number % len(SIZES)]
    layers = LAYERS if feature.endswith(("layers", "into")) else 2
    return dataclasses.replace(sized(key, nbytes, seed=seed), layers=layers)


def incarnation_of(data: Payload) -> int:
    """The incarnation of the producer that has put a payload."""
    part: Any = data["gen"] if isinstance(data, KVCacheBundle) else data
    notes = part.metadata if isinstance(part, TensorTransferData) else part.metadata.extra
    return (int(notes["seed"]) - 1) // 1000


def end_of(data: Payload) -> dict[str, Any]:
    """What a writer of layers says at the end of its stream."""
    return {"key": data.request_id, "incarnation": incarnation_of(data)}


def chunk_count(key: str) -> int:
    """How many chunks the stream of a key has."""
    return 1 + random.Random(key).randrange(MOST_CHUNKS)


def chunk_of(key: str, incarnation: int, number: int) -> Tensors:
    """Chunk `number` of a key's stream: of no rows, of few, and of too many for an offer."""
    seed = number + 16 * (number_of(key) + 1000 * incarnation)
    return chunk(seed, random.Random(seed).choice((0, 1, 5, 900)))


def sizes_of(tensors: Tensors) -> dict[str, int]:
    """How many rows of a chunk each request has."""
    rows = len(tensors["hidden"])
    return {REQUESTS[0]: rows // 3, REQUESTS[1]: rows - rows // 3}


def prompt_of(key: str) -> list[int]:
    """The tokens under which a key's cache is looked up; no prefix of two keys is equal."""
    return [10_000 + number_of(key), *range(TOKENS - 1)]
