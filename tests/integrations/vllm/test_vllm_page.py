"""The commands of docs/vllm.md, without the engines that they start."""

from __future__ import annotations

import json
import shlex

import pytest
from doc_blocks import blocks

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")


def test_vllm_takes_the_configuration_of_the_page() -> None:
    from vllm.config import KVTransferConfig

    from omni_kvlink.integrations.vllm.settings import VllmSettings

    text = next(one.text for one in blocks("docs/vllm.md") if "vllm serve" in one.first)
    argv = shlex.split(text)
    found = [json.loads(argv[n + 1]) for n, w in enumerate(argv) if w == "--kv-transfer-config"]
    for values, role in zip(found, ("kv_producer", "kv_consumer"), strict=True):
        config = KVTransferConfig(**values)
        assert config.kv_role == role
        is_producer, is_consumer = config.is_kv_producer, config.is_kv_consumer
        extra = config.kv_connector_extra_config
        assert VllmSettings.read(extra, produces=is_producer, consumes=is_consumer)
