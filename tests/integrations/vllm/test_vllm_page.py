"""The commands of docs/vllm.md and vllm_tiers.md, without the engines that they start."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from support.doc_blocks import ROOT, blocks

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")


def test_vllm_takes_the_configurations_of_the_page() -> None:
    from vllm.config import KVTransferConfig

    from omni_kvlink.integrations.vllm.settings import VllmSettings

    starts = ("vllm serve", "python -m dynamo.vllm")
    texts = [one.text for one in blocks("docs/vllm.md") if one.first.startswith(starts)]
    argv = [word for text in texts for word in shlex.split(text)]
    found = [json.loads(argv[n + 1]) for n, w in enumerate(argv) if w == "--kv-transfer-config"]
    made: list[tuple[str, Any]] = []
    assert found[2]["kv_connector"] == "MultiConnector"
    assert KVTransferConfig(**found[2])
    found[2] = found[2]["kv_connector_extra_config"]["connectors"][0]
    pair = ("kv_producer", "kv_consumer")
    for values, role in zip(found, (*pair, "kv_both", *pair * 4), strict=True):
        config = KVTransferConfig(**values)
        assert (config.kv_connector, config.kv_role) == ("OmniKVLinkConnector", role)
        is_producer, is_consumer = config.is_kv_producer, config.is_kv_consumer
        extra = config.kv_connector_extra_config
        settings = VllmSettings.of(extra, produces=is_producer, consumes=is_consumer)
        made.append((role, settings))
    check_containers(made[7:9])


def check_containers(made: list[tuple[str, Any]]) -> None:
    """Each side allows the other's user, and neither takes another path."""
    (_, producer), (_, consumer) = made
    assert producer.serve["allow_uids"] == (1001,)
    assert consumer.connect["allow_uids"] == (1000,)
    for options in (producer.serve, consumer.connect):
        assert (options["directory"], options["require"]) == ("/run/kvlink", ("shm",))


def test_the_settings_of_the_tier() -> None:
    """The page's configuration is one that the tier takes, and its table has each setting."""
    from vllm.config import KVTransferConfig

    from omni_kvlink.integrations import vllm as integration
    from omni_kvlink.integrations.vllm.tier.settings import TierSettings
    from omni_kvlink.settings import rules

    page = "docs/vllm_tiers.md"
    [text] = [one.text for one in blocks(page) if "vllm serve" in one.first]
    argv = shlex.split(text)
    config = KVTransferConfig(**json.loads(argv[argv.index("--kv-transfer-config") + 1]))
    [entry] = config.kv_connector_extra_config["secondary_tiers"]
    assert (entry.pop("type"), entry.pop("module_path")) == ("OmniKVLinkTier", integration.__name__)
    settings = TierSettings.of(entry, 0)
    assert (settings.stores, settings.budget) == (("shm://store",), 32 << 30)
    described = re.findall(r"^\| (`.*`) \|", (ROOT / page).read_text(), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(described))) - {"backpressure"} == {
        *rules(TierSettings)
    }
