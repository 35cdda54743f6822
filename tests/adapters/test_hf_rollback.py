"""Caches of transformers that are cropped, reordered or repeated, before a transfer and after it.

Whatever a method does to the cache that was sent, a value or an error, it does to the received one.
Refused are a cache of 4.50 without layers, and a window that `crop` gave a negative length.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVConsumer, KVLink, KVProducer, SchemaError, TensorTransferData
from omni_kvlink.adapters import DynamicCacheAdapter, hf_state, make_cache
from omni_kvlink.payload.views import same_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: make test-hf"
)
ADAPTER = DynamicCacheAdapter()
BATCH, HEADS, DIM, WINDOW = 3, 2, 8, 6
KINDS = {"full": "ff", "windows": "ss", "mixed": "sf"}
TOKENS = (0, 1, WINDOW - 1, WINDOW, WINDOW + 3)
NUMBERS = itertools.count()


def config(kinds: str) -> Any:
    """Of a model whose layers are (f)ull or (s)liding."""
    names = {"f": "full_attention", "s": "sliding_attention"}
    return transformers.Qwen2Config(
        num_hidden_layers=len(kinds),
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=[names[kind] for kind in kinds],
    )


def batch_of(cache: Any) -> int:
    return next((len(key) for key, _ in parts(cache) if len(key)), BATCH)


def parts(cache: Any) -> list[tuple[Any, Any]]:
    """K and V of each layer; without elements for a layer that has none."""
    if hasattr(cache, "layers"):
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
    else:
        pairs = list(zip(cache.key_cache, cache.value_cache, strict=True))
    return [(tensor_or_nothing(key), tensor_or_nothing(value)) for key, value in pairs]


def tensor_or_nothing(part: Any) -> Any:
    return part if isinstance(part, torch.Tensor) and part.numel() else ()


def step(cache: Any, tokens: int = 1) -> list[torch.Tensor]:
    """Read tokens as a model does; returns what attention sees of each layer."""
    generator, seen = torch.Generator().manual_seed(tokens), []
    for layer in range(2):
        shape = (2, batch_of(cache), HEADS, tokens, DIM)
        seen += cache.update(*torch.randn(shape, generator=generator), layer)
    return seen


METHODS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda cache: None,
    "a token": step,
    "tokens": lambda cache: step(cache, 4),
    "crop to 2": lambda cache: cache.crop(2),
    "crop 0": lambda cache: cache.crop(0),
    "crop 2": lambda cache: cache.crop(-2),
    "crop all": lambda cache: cache.crop(-20),
    "reorder beams": lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "record": lambda cache: cache.activate_past_recording(),
}


def outcome(cache: Any, method: Callable[[Any], Any]) -> tuple[str, Any]:
    """What a method raises or returns."""
    try:
        return "", method(cache)
    except Exception as error:
        return type(error).__name__, None


def assert_alike(cache: Any, other: Any) -> None:
    mine, theirs = parts(cache), parts(other)
    assert len(mine) == len(theirs) or not any(len(key) for key, _ in mine + theirs)
    for pair, others in zip(mine, theirs, strict=False):
        for one, two in zip(pair, others, strict=True):
            assert len(one) == len(two)
            assert not len(one) or same_bytes(one, two)
    for layer in range(len(mine)):
        assert cache.get_seq_length(layer) == other.get_seq_length(layer)
    for one, two in zip(getattr(cache, "layers", ()), getattr(other, "layers", ()), strict=True):
        if one.get_seq_length():
            assert one.get_mask_sizes(*MASKED) == two.get_mask_sizes(*MASKED)
        for name in hf_state.LAYER.sent - {"keys", "values"}:
            assert getattr(one, name, None) == getattr(two, name, None), name


MASKED: list[Any] = [1 if transformers.__version__ >= "5" else torch.arange(1)]
"""What `get_mask_sizes` takes: a number of tokens, before 5.0 their positions."""


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[KVProducer, KVConsumer]]:
    url = f"shm://hf-rollback-{next(NUMBERS)}"
    with KVLink.serve(url) as producer, KVLink.connect(url, timeout=60) as consumer:
        yield producer, consumer


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("before", METHODS)
def test_the_received_cache_does_what_the_sent_one_does(
    ends: tuple[KVProducer, KVConsumer], kinds: str, before: str
) -> None:
    producer, consumer = ends
    for tokens, records, after in itertools.product(TOKENS, (False, True), METHODS):
        cache = make_cache(config(kinds))
        if records and outcome(cache, METHODS["record"])[0]:
            continue
        if tokens:
            step(cache, tokens)
        if outcome(cache, METHODS[before])[0]:
            continue  # it may have changed some of the layers
        if not parts(cache) or cache.get_seq_length() < 0:
            with pytest.raises(SchemaError, match=r"no layers|has seen -\d+ "):
                ADAPTER.pack(cache, request_id="r")
            continue
        name = f"r-{next(NUMBERS)}"
        producer.put(ADAPTER.pack(cache, request_id=name))
        with consumer.get(name, timeout=60) as payload:
            assert not isinstance(payload, TensorTransferData)
            received = ADAPTER.unpack(payload, config=config(kinds))
            sent = copy.deepcopy(cache)
            assert_alike(sent, received)
            for method in (after, "a token", "crop 2", "tokens"):
                mine, theirs = (outcome(x, METHODS[method]) for x in (sent, received))
                assert mine[0] == theirs[0], (tokens, records, after, method)
                if mine[0]:
                    break
                assert_alike(sent, received)
                if mine[1] is not None and theirs[1] is not None:
                    assert all(map(same_bytes, mine[1], theirs[1]))
            del received


def test_layers_without_tokens(ends: tuple[KVProducer, KVConsumer]) -> None:
    """Their dtype and shape count for the next update."""
    cache = make_cache(config("sf"))
    if not hasattr(cache, "early_initialization"):
        pytest.skip("caches of this version have no layers before the first token")
    dtype = torch.float64
    cache.early_initialization(BATCH, HEADS, DIM, dtype, torch.device("cpu"))
    step(cropped := make_cache(config("sf")))
    cropped.crop(-1)
    for number, sent in enumerate((cache, cropped)):
        ends[0].put(ADAPTER.pack(sent, request_id=f"empty-{number}"))
        with ends[1].get(f"empty-{number}", timeout=60) as payload:
            assert not isinstance(payload, TensorTransferData)
            received = ADAPTER.unpack(payload, config=config("sf"))
        for mine, theirs in zip(sent.layers, received.layers, strict=True):
            assert mine.is_initialized
            assert theirs.is_initialized
            assert mine.keys.shape == theirs.keys.shape
        assert all(map(same_bytes, step(sent), step(received)))
    received.crop(-received.get_seq_length())
    assert_alike(ADAPTER.unpack(ADAPTER.pack(sent, request_id="r"), into=received), sent)


def test_layers_that_have_seen_unlike_numbers_of_tokens() -> None:
    """As `crop` leaves them that one layer refuses."""
    cache = make_cache(config("ff"))
    step(cache, 5)
    cache.update(*torch.randn(2, BATCH, HEADS, 1, DIM), 1)
    payload = ADAPTER.pack(cache, request_id="r")
    with pytest.raises(SchemaError, match=r"layers that have seen \[5, 6\] tokens"):
        ADAPTER.unpack(payload, config=config("ff"))
