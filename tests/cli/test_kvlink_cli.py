"""The `kvlink` command."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from omni_kvlink.cli.commands import run
from omni_kvlink.connectors.control.keys import read_public, read_secret

if TYPE_CHECKING:
    from pathlib import Path


def test_keygen_writes_a_pair_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keygen", str(tmp_path / "keys"), "producer"]) == 0
    secret, public = (tmp_path / "keys" / f"producer.{kind}" for kind in ("secret", "public"))
    assert read_secret(str(secret)) != read_public(str(public))
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    printed = capsys.readouterr().out
    assert str(secret) in printed
    assert str(public) in printed


def test_keygen_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keygen", str(tmp_path), "a"]) == 0
    before = (tmp_path / "a.secret").read_bytes()
    assert run(["keygen", str(tmp_path), "a"]) == 2
    assert (tmp_path / "a.secret").read_bytes() == before
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "../x", ".hidden"])
def test_keygen_refuses_other_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(["keygen", str(tmp_path), name]) == 2
    assert "letters" in capsys.readouterr().err
