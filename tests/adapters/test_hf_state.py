"""Every attribute of transformers' caches is sent, irrelevant or refused."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import SchemaError
from omni_kvlink.adapters import DynamicCacheAdapter, hf_state, make_cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

cache_utils = pytest.importorskip(
    "transformers.cache_utils", reason="transformers is not installed: make test-hf"
)
ADAPTER = DynamicCacheAdapter()
CLASSES = {
    name: found
    for name, found in vars(cache_utils).items()
    if inspect.isclass(found)
    and found.__module__ == cache_utils.__name__
    and any(word in name for word in ("Cache", "Layer"))
}
SENT = {
    name: hf_state.CACHE if name == hf_state.CACHE_CLASS else hf_state.LAYER
    for name in (hf_state.CACHE_CLASS, *hf_state.LAYER_CLASSES)
    if name in CLASSES
}
"""The lists of each class that is sent."""
HAS_RECORDING = hasattr(cache_utils.DynamicCache, "activate_past_recording")


def attributes(kind: type) -> Iterator[str]:
    """What a class and its bases have, and what their methods set on themselves."""
    for base in kind.__mro__:
        if not base.__module__.startswith("transformers"):
            continue
        yield from inspect.get_annotations(base)
        for name, value in vars(base).items():
            is_code = callable(value) or isinstance(value, (property, classmethod, staticmethod))
            if not name.startswith("__") and not is_code:
                yield name
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and type(node.ctx).__name__ == "Store":
                yield node.attr


@pytest.mark.parametrize("name", SENT)
def test_every_attribute_is_in_one_list(name: str) -> None:
    found = set(attributes(CLASSES[name])) - {"_abc_impl"}
    assert found, name
    for attribute in sorted(found):
        lists = [attribute in each for each in SENT[name]]
        assert sum(lists) == 1, f"{name}.{attribute} is in {sum(lists)} of the three lists"


TOMORROW = """
from transformers.cache_utils import DynamicCache as Today

class DynamicCache(Today):
    annotated: int
    state_of_class = 1

    def remember(self):
        self.state_of_method = 1
"""


def test_a_new_attribute_is_in_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test before fails when a version adds one: in a method, or in the class."""
    (tmp_path / "transformers_of_tomorrow.py").write_text(TOMORROW)
    monkeypatch.syspath_prepend(tmp_path)
    found = set(attributes(importlib.import_module("transformers_of_tomorrow").DynamicCache))
    assert found >= {"state_of_method", "state_of_class", "annotated"}
    known = frozenset().union(*hf_state.CACHE, *hf_state.LAYER)
    assert not known & {"state_of_method", "state_of_class", "annotated"}


@pytest.mark.parametrize("name", sorted(set(CLASSES) - set(SENT)))
def test_all_other_classes_are_refused(name: str) -> None:
    """Whatever they hold; a class that a later version adds is, too."""
    kind = CLASSES[name]
    concrete: Any = type(name, (kind,), {})
    concrete.__abstractmethods__ = frozenset()
    other = kind.__new__(concrete)
    with pytest.raises(SchemaError, match=f"a {name}; wanted a DynamicCache"):
        ADAPTER.pack(other, request_id="r")
    if "DynamicLayer" in CLASSES:
        cache = filled(make_cache())
        cache.layers[1] = other
        with pytest.raises(SchemaError, match=f"layer 1 is a {name}"):
            ADAPTER.pack(cache, request_id="r")


def filled(cache: Any, tokens: int = 4) -> Any:
    for layer in range(2):
        cache.update(torch.rand(1, 2, tokens, 8), torch.rand(1, 2, tokens, 8), layer)
    return cache


def test_an_unknown_attribute_of_an_object_is_refused() -> None:
    cache = filled(make_cache())
    cache.positions = [1]
    with pytest.raises(SchemaError, match="the DynamicCache has an attribute 'positions'"):
        ADAPTER.pack(cache, request_id="r")
    if hasattr(cache, "layers"):
        cache = filled(make_cache())
        cache.layers[1].scales = None
        with pytest.raises(SchemaError, match="layer 1, a DynamicLayer, has an attribute 'scales'"):
            ADAPTER.export(cache, request_id="r")
        cache = filled(make_cache())
        cache.prefetch_stream = object()
        with pytest.raises(SchemaError, match="prefetch_stream set"):
            ADAPTER.pack(cache, request_id="r")


WINDOW = 6


def windows() -> Any:
    cache = make_cache()
    cache.layers[:] = [
        cache_utils.DynamicLayer(),
        cache_utils.DynamicSlidingWindowLayer(sliding_window=WINDOW),
    ]
    return cache


@pytest.mark.skipif(not HAS_RECORDING, reason="windows of this version record no past")
@pytest.mark.parametrize("before", [0, 3, 9])
@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("cropped", [0, -1, -2])
def test_a_window_that_records_its_past(before: int, after: int, cropped: int) -> None:
    """It arrives as one, with all it keeps, and can be cropped as the sent one can."""
    cache = windows()
    if before:
        filled(cache, before)
    cache.activate_past_recording()
    if after:
        filled(cache, after)
    if before + after + cropped >= WINDOW and after + cropped >= 0:
        cache.crop(cropped)
    received = ADAPTER.unpack(ADAPTER.pack(cache, request_id="r"), into=windows())
    assert [getattr(layer, "record_past", None) for layer in received.layers] == [None, True]
    for _ in range(2):
        for mine, theirs in zip(cache.layers, received.layers, strict=True):
            assert mine.get_seq_length() == theirs.get_seq_length()
            if mine.get_seq_length():
                assert torch.equal(mine.keys, theirs.keys)
                assert torch.equal(mine.values, theirs.values)
        for layer in range(2):
            parts = torch.rand(2, 1, 2, 3, 8)
            mine = cache.update(parts[0], parts[1], layer)
            theirs = received.update(parts[0], parts[1], layer)
            assert all(map(torch.equal, mine, theirs))
        cache.crop(-2)
        received.crop(-2)


@pytest.mark.skipif(not HAS_RECORDING, reason="windows of this version record no past")
def test_a_recording_that_a_target_cannot_keep() -> None:
    cache = windows()
    cache.activate_past_recording()
    payload = ADAPTER.pack(filled(cache), request_id="r")
    target = windows()
    del target.layers[1].record_past
    with pytest.raises(SchemaError, match="record their past"):
        ADAPTER.unpack(payload, into=target)
