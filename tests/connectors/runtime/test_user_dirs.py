"""This user's directory: one place, or an error that says why it cannot be told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from omni_kvlink import ConnectorError
from omni_kvlink.connectors.runtime.user_files import default_directory

if TYPE_CHECKING:
    from pathlib import Path


def test_another_directory_is_taken_only_where_the_first_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    elsewhere = default_directory()
    assert not elsewhere.startswith(str(runtime))
    runtime.write_text("")
    assert default_directory() == elsewhere
    runtime.unlink()
    runtime.mkdir()
    assert default_directory() == str(runtime / "kvlink")


def test_a_directory_that_cannot_be_looked_at_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(loop))
    with pytest.raises(ConnectorError, match=r"loop: .*set XDG_RUNTIME_DIR"):
        default_directory()
