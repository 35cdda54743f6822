"""The conformance kit: right implementations pass, wrong ones are named, faults are armed."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import omni_kvlink
from omni_kvlink import KVCacheTransferData, KVMetadata
from omni_kvlink.adapters.base import CacheAdapter
from omni_kvlink.payload.views import dense
from omni_kvlink.testing import (
    CONNECTOR_CHECKS,
    CheckFailed,
    check_adapter,
    check_connector,
    faults,
)
from omni_kvlink.testing.caches import Recipe, every_dtype, fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping

_numbers = itertools.count()
Cache = dict[str, list[torch.Tensor | None]]


def make_cache(keys: list[torch.Tensor | None], values: list[torch.Tensor | None]) -> Cache:
    return {"key_cache": keys, "value_cache": values}


class PlainAdapter(CacheAdapter[Cache]):
    """The least that fulfils the contract, but for one error's type."""

    def export(
        self, cache: Cache, *, request_id: str, metadata: KVMetadata | Mapping[str, Any]
    ) -> KVCacheTransferData:
        return KVCacheTransferData(request_id, cache, (), metadata)

    def load(self, data: KVCacheTransferData, into: Cache) -> Cache:
        blocks = data.layer_blocks
        for name, layers in into.items():
            pairs = zip(blocks[name], layers, strict=True)
            layers[:] = [None if layer is None else self.loaded(dense(layer)) for layer, _ in pairs]
        return into

    def loaded(self, layer: torch.Tensor) -> torch.Tensor:
        return layer


class CopyingAdapter(PlainAdapter):
    def loaded(self, layer: torch.Tensor) -> torch.Tensor:
        return layer.clone()


class AdapterWithoutCheck(PlainAdapter):
    """Exports a cache with a missing layer as an empty one."""

    def export(
        self, cache: Cache, *, request_id: str, metadata: KVMetadata | Mapping[str, Any]
    ) -> KVCacheTransferData:
        empty: list[torch.Tensor | None] = [None] * len(cache["key_cache"])
        if None in cache["key_cache"]:
            cache, metadata = make_cache(empty, empty), KVMetadata((0,), (0,), len(empty))
        return super().export(cache, request_id=request_id, metadata=metadata)


@pytest.mark.parametrize(
    ("adapter", "check"),
    [
        (PlainAdapter(), "check_load_into_another_size"),  # a ValueError is no SchemaError
        (CopyingAdapter(), "check_round_trip"),
        (AdapterWithoutCheck(), "check_missing_layers"),
    ],
    ids=lambda value: getattr(value, "__class__", value).__name__,
)
def test_adapter_kit_names_what_is_wrong(adapter: PlainAdapter, check: str) -> None:
    with pytest.raises(CheckFailed) as found:
        check_adapter(adapter, make_cache)
    assert found.value.check == check


def test_connector_kit_passes_inproc() -> None:
    """Each check runs over `inproc` in `tests/connectors`; here, that a kit of them does."""
    checks = CONNECTOR_CHECKS[::6]
    check_connector(lambda: f"inproc://kit-{next(_numbers)}", processes=False, checks=checks)


def test_connector_kit_with_readers_in_a_process(sockets: str) -> None:
    check_connector(
        lambda: f"shm://kit-{next(_numbers)}",
        options={"directory": sockets},
        checks=CONNECTOR_CHECKS[:3],
    )


def test_connector_kit_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that never finds its payload does not pass."""
    monkeypatch.setattr("omni_kvlink.connectors.runtime.consumer.holds", lambda *_, **__: False)
    options = {"inline": 0}
    with pytest.raises(CheckFailed, match="holds another") as found:
        check_connector(lambda: f"inproc://kit-{next(_numbers)}", options=options, processes=False)
    assert found.value.check == "check_every_dtype_arrives"


@pytest.mark.parametrize("bundle", [False, True])
def test_recipes_are_repeatable_and_different(bundle: bool) -> None:
    recipes = [*every_dtype("k", bundle=bundle), Recipe("k", seed=99, bundle=bundle)]
    first = [fingerprint(recipe.make()) for recipe in recipes]
    assert first == [fingerprint(Recipe(**recipe.to_dict()).make()) for recipe in recipes]
    assert len(set(first)) == len(first)


def test_fingerprint_sees_one_bit() -> None:
    data = Recipe("k").make()
    before = fingerprint(data)
    dense(data.tensors()[-1]).view(torch.uint8).view(-1)[-1] ^= 1
    assert fingerprint(data) != before


def test_faults_are_armed_by_name() -> None:
    env = faults.armed({"put.copied": "kill", "get.mapped": "sleep:0.1"}, {"A": "b"})
    assert env == {"A": "b", faults.VARIABLE: "put.copied=kill,get.mapped=sleep:0.1"}
    assert faults.armed({"put.copied": "raise"})["PATH"] == os.environ["PATH"]
    with pytest.raises(ValueError, match=r"OMNI_KVLINK_FAULT: .*there are put.reserved"):
        faults.armed({"put.nowhere": "kill"})


def test_every_fault_point_is_in_the_code() -> None:
    """Every fault point is in the code; the tests of one that is not would check nothing."""
    files = Path(omni_kvlink.__file__).parent.rglob("*.py")
    texts = [file.read_text() for file in files]
    found = {name for text in texts for name in re.findall(r'\bpoint\("([^"]+)"\)', text)}
    assert found == set(faults.POINTS)


@pytest.mark.parametrize(("action", "code"), [("kill", -9), ("raise", 1)])
def test_faults_happen_in_the_child(action: str, code: int) -> None:
    program = "from omni_kvlink.testing import faults; faults.point('put.copied')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=faults.armed({"put.copied": action}),
        stderr=subprocess.DEVNULL,
    )
    assert done.returncode == code
