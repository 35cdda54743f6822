"""The right to serve at a path: held by one, lost with its process, never waited for."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import BusyError, ConnectorError
from omni_kvlink.connectors.runtime.user_files import LockFile, check_private

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "a")


def test_one_at_a_time_has_it(path: str) -> None:
    first = LockFile(path)
    with pytest.raises(BusyError, match="another producer serves this name"):
        LockFile(path)
    with LockFile(f"{path}b"):
        pass
    first.close()
    first.close()
    with LockFile(path):
        assert os.stat(f"{path}.lock").st_mode & 0o777 == 0o600
    assert os.listdir(os.path.dirname(path)) == []


def test_the_file_of_a_dead_process_is_taken_over(path: str) -> None:
    child = os.fork()
    if child == 0:
        LockFile(path)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.path.exists(f"{path}.lock")
    LockFile(path).close()
    assert not os.path.exists(f"{path}.lock")


def test_a_file_that_was_removed_is_not_its_owners(path: str) -> None:
    first = LockFile(path)
    os.unlink(f"{path}.lock")
    second = LockFile(path)
    first.close()
    with pytest.raises(BusyError):
        LockFile(path)
    second.close()


def test_who_opened_the_file_before_it_was_removed_opens_it_again(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two would have it: one by a file that nobody finds any more."""
    first = LockFile(path)
    open_file = os.open

    def open_late(*arguments: int) -> int:
        fd = open_file(*arguments)  # type: ignore[arg-type]
        monkeypatch.undo()
        first.close()
        return fd

    monkeypatch.setattr(os, "open", open_late)
    with LockFile(path), pytest.raises(BusyError):
        LockFile(path)


def test_a_stopped_process_keeps_no_other_name(path: str) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        LockFile(path)
        os.write(writing, b"x")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(1)
    os.read(reading, 1)
    os.waitpid(child, os.WUNTRACED)
    with pytest.raises(BusyError):
        LockFile(path)
    LockFile(f"{path}b").close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    LockFile(path).close()
    os.close(reading)
    os.close(writing)


def test_no_link_is_followed(path: str, tmp_path: Path) -> None:
    os.symlink(tmp_path / "other", f"{path}.lock")
    with pytest.raises(ConnectorError, match=r"a\.lock: .* no symbolic link: use another path"):
        LockFile(path)
    assert not (tmp_path / "other").exists()


# Directories


@pytest.mark.parametrize("what", ["file", "dangling link", "link", "below a file"])
def test_no_directory(tmp_path: Path, what: str) -> None:
    """What another user may have made in /tmp: the error says what to do."""
    directory = tmp_path / "kvlink-0"
    if what == "file":
        directory.touch()
    elif what == "dangling link":
        directory.symlink_to(tmp_path / "nothing")
    elif what == "link":
        directory.symlink_to(tmp_path)
    else:
        directory.touch()
        directory = directory / "below"
    with pytest.raises(ConnectorError, match=r"give directory=, or set XDG_RUNTIME_DIR"):
        check_private(str(directory))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_directory_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ConnectorError, match=r"of uid 65534.*directory=.*XDG_RUNTIME_DIR"):
        check_private(str(tmp_path))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720, 0o702])
def test_directory_that_others_can_write_to(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConnectorError, match=r"nobody else can write to.*chmod go-w"):
        check_private(str(tmp_path))
