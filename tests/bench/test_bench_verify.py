"""`kvlink-bench verify`: everything arrives, and what does not is seen."""

from __future__ import annotations

import json

import pytest

from omni_kvlink import KVLink, SchemaError
from omni_kvlink.bench import verify
from omni_kvlink.bench.cases import cases
from omni_kvlink.bench.cli import main
from omni_kvlink.link import Payload


def test_everything_arrives_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quick", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["schema", "command", "machine", "setup", "results"]
    results = document["results"]
    assert results["passed"] == results["cases"] == len(list(cases(quick=True)))
    assert results["failed"] == []
    assert results["bytes"] > 1 << 26


def test_one_bit_spoiled_in_flight_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", "--quick", "--connector", "inproc", "--corrupt", "23"]
    assert main(command) == 1
    text = capsys.readouterr().out
    assert "1 of 630 cases FAILED" in text
    assert "FAILED case 23:" in text
    assert "tensors [3] of 4" in text


@pytest.mark.parametrize("connector", ["shm", "inproc"])
def test_each_spoiled_case_fails_alone(connector: str) -> None:
    chosen = list(cases(quick=True))[:12]
    verdict = verify.run(connector, chosen, corrupt=7)
    assert [outcome.case.number for outcome in verdict.failed] == [7]
    assert "FAILED" in verdict.text()


def test_a_put_that_fails_fails_its_case_only(monkeypatch: pytest.MonkeyPatch) -> None:
    put = KVLink.put

    def refuse_one(link: KVLink, data: Payload) -> object:
        if data.request_id == "case-1":
            raise SchemaError("not today")
        return put(link, data)

    monkeypatch.setattr(KVLink, "put", refuse_one)
    verdict = verify.run("inproc", list(cases(quick=True))[:4])
    assert [outcome.problem for outcome in verdict.failed] == ["put: not today"]
