"""`kvlink doctor --config`: every key of the files that hosts read, by what reads it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from omni_kvlink.cli.commands import run
from omni_kvlink.doctor.examination import examine
from omni_kvlink.doctor.inquiry import Inquiry
from support.processes.doctor_process import wrong_findings

if TYPE_CHECKING:
    from pathlib import Path

    from omni_kvlink.doctor.report import HealthReport

TRANSFER: dict[str, Any] = {
    "kv_connector": "OmniKVLinkConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"url": "shm://prefill-0"},
}
ENCODER: dict[str, Any] = {
    "ec_connector": "OmniECLinkConnector",
    "ec_role": "ec_consumer",
    "ec_connector_extra_config": {"peers": ["shm://encoder-0"]},
}
DEPLOY: dict[str, Any] = {
    "pipeline": "bagel",
    "stages": [
        {"stage_id": 0, "max_num_seqs": 3, "gpu_memory_utilization": 0.5},
        {"stage_id": 1, "input_connectors": {"from_stage_0": "kv"}},
    ],
    "connectors": {
        "kv": {"name": "OmniKVLinkConnector", "extra": {"kvlink": {"transport": "shm"}}},
    },
}
OTHER = {**DEPLOY, "pipeline": "qwen3_omni"}


def look(path: Path, values: object) -> HealthReport:
    text = json.dumps(values) if path.suffix == ".json" else yaml.safe_dump(values)
    path.write_text(text)
    return examine(Inquiry(config=str(path), areas=("configuration",)))


def changed(values: dict[str, Any], where: str, value: object) -> dict[str, Any]:
    """The same values but for one, at a path such as "stages/0/max_num_seq"."""
    copy = json.loads(json.dumps(values))
    *parents, last = where.split("/")
    node: Any = copy
    for parent in parents:
        node = node[int(parent) if isinstance(node, list) else parent]
    node[last] = value
    assert isinstance(copy, dict)
    return copy


RIGHT = {
    "transfer.json": TRANSFER,
    "transfer.yaml": {"kv_transfer_config": TRANSFER, "model": "m"},
    "encoder.json": ENCODER,
    "multi.json": {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [TRANSFER, {"kv_connector": "Other"}]},
    },
    "deploy.yaml": DEPLOY,
    "other.yaml": OTHER,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_file(name: str, tmp_path: Path) -> None:
    report = look(tmp_path / name, RIGHT[name])
    assert report.healthy, report.text()
    assert "ok" in [finding.status for finding in report.findings]


EXTRA = "kv_connector_extra_config"
MISSPELT = [
    ("a.json", TRANSFER, "kv_rol", "kv_role"),
    ("a.json", TRANSFER, f"{EXTRA}/tll", "ttl"),
    ("a.json", changed(TRANSFER, f"{EXTRA}/serve", {}), f"{EXTRA}/serve/quotta", "quota"),
    ("a.json", ENCODER, "ec_connector_extra_config/peer", "peers"),
    ("a.json", RIGHT["multi.json"], f"{EXTRA}/connectors/0/{EXTRA}/modell", "model"),
    ("a.yaml", DEPLOY, "stages/0/max_num_seq", "max_num_seqs"),
    ("a.yaml", DEPLOY, "stagess", "stages"),
    ("a.yaml", DEPLOY, "connectors/kv/extra/kvlink/transpot", "transport"),
    ("a.yaml", OTHER, "connectors/kv/extra/kvlink/transpot", "transport"),
]


@pytest.mark.parametrize(("name", "values", "where", "meant"), MISSPELT)
def test_a_misspelt_option(
    name: str, values: dict[str, Any], where: str, meant: str, tmp_path: Path
) -> None:
    report = look(tmp_path / name, changed(values, where, "1"))
    [finding] = wrong_findings(report)
    assert where.rpartition("/")[2] in finding.text
    assert f"did you mean {meant}?" in finding.text + finding.cure
    assert finding.cure


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        ("kv_role", "producer", "kv_producer, kv_consumer or kv_both"),
        (f"{EXTRA}/ttl", -1, "a number of seconds above 0"),
        (f"{EXTRA}/url", "shn://a", "did you mean shm?"),
        (f"{EXTRA}/url", "", "url is missing"),
    ],
)
def test_a_wrong_value(where: str, value: object, expected: str, tmp_path: Path) -> None:
    [finding] = wrong_findings(look(tmp_path / "a.json", changed(TRANSFER, where, value)))
    assert expected in f"{finding.text}; {finding.cure}"


@pytest.mark.parametrize("text", ["[1, 2]", "{", "a: b: c", "\x00", "x", "\udcff"])
def test_what_is_no_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(os.fsencode(text))
    assert run(["doctor", "--only=configuration", f"--config={tmp_path}/a.yaml"]) == 1


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--only=configuration", f"--config={tmp_path}/no.yaml"]) == 1
    assert "No such file or directory" in capsys.readouterr().out


def test_misspelt_fields_of_a_deployment_are_those_alone(tmp_path: Path) -> None:
    """A known field of another value is not said to be another field."""
    wrong = changed(DEPLOY, "stages/0/num_replicas", 2)
    [finding] = wrong_findings(look(tmp_path / "a.yaml", wrong))
    assert "did you mean" not in finding.text + finding.cure
