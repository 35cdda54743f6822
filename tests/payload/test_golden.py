"""Files that released versions wrote: each stays readable, and today's is what it was."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch

from omni_kvlink.payload.format import KV_VERSION, VERSION
from omni_kvlink.payload.manifest import Manifest
from support.payloads.random_caches import bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.payload.bundle import Payload

HERE = Path(__file__).parent / "golden"
MAKE: dict[str, Any] = runpy.run_path(str(HERE / "make.py"))
ALL = sorted(HERE.glob("v*.safetensors"))
FILES: dict[str, Callable[[], Payload]] = MAKE["FILES"]


def expected(path: Path) -> Any:
    return FILES[path.stem]()


def test_every_version_has_its_files() -> None:
    assert {path.stem for path in ALL} == set(FILES)
    assert MAKE["CONTENTS"].keys() == {KV_VERSION, VERSION}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_it_is_read_as_what_was_written(path: Path) -> None:
    data = expected(path)
    found = type(data).load(path)
    assert found.difference(data) == ""
    assert repr(found) == repr(data)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_bytes_are_those_of_the_names(path: Path) -> None:
    """Without this library: stock safetensors and a hash."""
    tensors = safetensors.torch.load_file(path)
    named = {name: tensor for name, tensor in tensors.items() if not name.startswith("pad.")}
    assert named
    for name, tensor in named.items():
        assert bits(tensor) == MAKE["raw"](name, tensor.numel() * tensor.element_size())


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_today_the_same_bytes_are_written(path: Path) -> None:
    wrote = path.read_bytes()
    producer = Manifest.decode(wrote).producer
    assert MAKE["payload"](expected(path), producer) == wrote
