"""What the connector says to one version of vLLM and not to another."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

import vllm

from omni_kvlink.integrations.vllm import versions
from support.vllm.steps import SteppedEngine

Open = Callable[..., SteppedEngine]


@pytest.mark.parametrize("version", ["0.33.0", "0.3.0", "0.320.0", "dev"])
def test_an_untested_version_is_logged(
    engine: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    engine("producer")
    assert f"not tested with vLLM {version}, but with 0.30, 0.31, 0.32" in caplog.text


def test_a_tested_version_is_not(engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    """This one: `make test-vllm` installs no other."""
    engine("producer")
    assert "not tested" not in caplog.text
    assert vllm.__version__.startswith(versions.TESTED)


@pytest.mark.skipif(
    importlib.util.find_spec("vllm.v1.metrics.cache_hit_source") is None,
    reason="vLLM 0.32 and later count loaded tokens by their source",
)
def test_the_source_of_loaded_tokens(engine: Open) -> None:
    connector = engine("consumer").scheduler.connector
    found = connector.get_external_cache_hit_sources(None, 33)
    assert {source.value: tokens for source, tokens in found.items()} == {"p2p": 33}
    assert connector.get_external_cache_hit_sources(None, 0) == {}
