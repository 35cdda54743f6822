"""`kvlink-bench verify`: all cases arrive, and a flipped bit is reported."""

from __future__ import annotations

import json

import pytest

from omni_kvlink.bench import verify
from omni_kvlink.bench.cases import TENSORS, cases
from omni_kvlink.bench.commands import run
from omni_kvlink.bench.setups import VerifySetup


def test_everything_arrives_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--quick", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["schema", "command", "machine", "setup", "results"]
    results = document["results"]
    assert results["passed"] == results["cases"] == len(list(cases(quick=True)))
    assert results["failed"] == []
    assert results["bytes"] > 1 << 26


def test_one_flipped_bit_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = list(cases(quick=True))[:30]
    monkeypatch.setattr(verify, "cases", lambda *, quick: chosen)
    command = ["verify", "--quick", "--connector", "inproc", "--corrupt", "23"]
    assert run(command) == 1
    text = capsys.readouterr().out
    assert "1 of 30 cases FAILED" in text
    assert "FAILED case 23:" in text
    assert "tensors [3] of 4" in text


@pytest.mark.parametrize("connector", ["shm", "inproc"])
def test_only_the_corrupt_case_fails(connector: str) -> None:
    chosen = list(cases(quick=True))[:12]
    verdict = verify.measure(VerifySetup(connector, corrupt=7), chosen=chosen)
    assert [outcome.case.number for outcome in verdict.failed] == [7]
    assert "FAILED" in verdict.text()


@pytest.mark.parametrize("connector", ["shm", "inproc"])
def test_a_flipped_bit_of_nested_tensors_is_reported(connector: str) -> None:
    tensors = [case for case in cases(quick=True) if case.rows == TENSORS]
    for chosen in (tensors[30:34], [case for case in tensors if case.branching != "single"][:4]):
        verdict = verify.measure(VerifySetup(connector, corrupt=chosen[1].number), chosen=chosen)
        assert [outcome.case for outcome in verdict.failed] == [chosen[1]]
        assert "tensors [" in verdict.failed[0].problem


def test_a_put_that_fails_fails_its_case_only() -> None:
    """The quota is too small for one of the cases."""
    caches = [case for case in cases(quick=True) if case.rows != TENSORS]
    by_size = sorted(caches, key=lambda case: case.shape.nbytes)
    chosen = [by_size[0], by_size[-1], by_size[1]]
    quota = by_size[-1].shape.nbytes
    assert quota > 4 * by_size[1].shape.nbytes + (1 << 16)
    setup = VerifySetup("inproc", url=f"inproc://small?quota={quota}")
    verdict = verify.measure(setup, chosen=chosen)
    assert [outcome.case for outcome in verdict.failed] == [by_size[-1]]
    assert verdict.failed[0].problem.startswith("put: key ")
    assert f"never fit into a quota of {quota}" in verdict.failed[0].problem
