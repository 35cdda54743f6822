"""Every input of the fuzzers' corpus is decoded, or refused by a documented error."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

DECODERS = Path(__file__).parents[2] / "fuzz" / "decoders.py"
if not DECODERS.exists():
    pytest.skip("installed without the sources", allow_module_level=True)


def load() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz_decoders", DECODERS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_decoders"] = module
    spec.loader.exec_module(module)
    return module


decoders = load()


@pytest.mark.parametrize("name", decoders.DECODERS)
def test_documented_errors_only(name: str) -> None:
    for data in decoders.corpus(name):
        decoders.run(name, data)
        decoders.run(name, data[:-1])
        decoders.run(name, data + b"\0")


@pytest.mark.parametrize("name", decoders.DECODERS)
def test_the_first_seed_is_accepted(name: str) -> None:
    """Else a decoder that refuses everything would pass."""
    decoders.DECODERS[name].decode(decoders.DECODERS[name].seeds()[0])


def test_an_undocumented_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(data: bytes) -> None:
        raise KeyError(data)

    broken = dataclasses.replace(decoders.DECODERS["engine"], decode=decode)
    monkeypatch.setitem(decoders.DECODERS, "engine", broken)
    with pytest.raises(KeyError):
        decoders.run("engine", b"")
