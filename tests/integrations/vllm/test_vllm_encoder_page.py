"""The commands of docs/vllm_encoder.md, without the engines that they start."""

from __future__ import annotations

import json
import shlex

import pytest

from support.doc_blocks import blocks

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")


def test_vllm_takes_the_configurations_of_the_page() -> None:
    from vllm.config import ECTransferConfig

    from omni_kvlink.integrations.vllm.settings import EncoderSettings

    texts = [one.text for one in blocks("docs/vllm_encoder.md") if "vllm serve" in one.first]
    argv = [word for text in texts for word in shlex.split(text)]
    options = [n for n, word in enumerate(argv) if word == "--ec-transfer-config"]
    configs = [ECTransferConfig(**json.loads(argv[n + 1])) for n in options]
    assert [config.ec_role for config in configs] == ["ec_producer", "ec_consumer"] * 2
    made = []
    for config in configs:
        assert config.ec_connector == "OmniKVLinkECConnector"
        settings = EncoderSettings.of(
            config.ec_connector_extra_config,
            produces=config.is_ec_producer,
            consumes=config.is_ec_consumer,
        )
        made.append(settings)
    for given, user in ((made[2].serve, 1001), (made[3].connect, 1000)):  # in containers
        assert (given["directory"], given["require"]) == ("/run/kvlink", ("shm",))
        assert given["allow_uids"] == (user,)
