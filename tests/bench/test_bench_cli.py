"""The commands when something is wrong, and the peers that they use."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys

import pytest

from omni_kvlink import TransferTimeout
from omni_kvlink.bench.commands import run
from omni_kvlink.bench.pair import open_pair
from omni_kvlink.bench.report import BenchError
from omni_kvlink.testing.peer_harness import PeerError, PeerExited, ProcessPeer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "--url", "shm://a b", "--preset", "tiny"], "shm://a b"),
        (["latency", "--tokens", "900000000"], "fewer --layers or --tokens"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("command", ["verify --quick", "latency --preset tiny --rounds 2"])
def test_over_ucx_without_an_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs; where ucxx is missing, one line says what installs it."""
    is_here = importlib.util.find_spec("ucxx") is not None
    assert run([*command.split(), "--connector", "ucx"]) == (0 if is_here else 2)
    if not is_here:
        error = capsys.readouterr().err
        assert "pip install 'omni-kvlink[ucx]'" in error
        assert error.count("\n") == 1


def test_help_says_what_paged_is() -> None:
    command = [sys.executable, "-m", "omni_kvlink.bench", "latency", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "blocks of 16 tokens in random order" in " ".join(done.stdout.split())


@pytest.mark.parametrize("connector", ["shm", "inproc"])
def test_a_reader_whose_command_fails_goes_on(connector: str) -> None:
    with open_pair(connector) as pair:
        with pytest.raises(TransferTimeout):
            pair.peer.call("get", key="never", timeout=0.05, verify="auto")
        with pytest.raises(PeerError, match="KeyError"):
            pair.peer.call("receive_baseline", name="none")
        assert pair.peer.call("ping") > 0


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_peer_that_exited_is_reported(concurrent: bool) -> None:
    peer = ProcessPeer(module="omni_kvlink.bench.reader", concurrent=concurrent)
    with contextlib.closing(peer):
        assert peer.call("ping") > 0
        peer.process.kill()
        with pytest.raises(PeerExited, match="ended with status -9"):
            peer.call("ping")


def test_a_reader_that_exited_ends_the_benchmark() -> None:
    with pytest.raises(BenchError, match="ended with status -9"):
        _kill_the_reader()


def _kill_the_reader() -> None:
    with open_pair("shm") as pair:
        assert isinstance(pair.peer, ProcessPeer)
        pair.peer.process.kill()
        pair.peer.call("ping")


def test_a_reader_that_does_not_answer_ends_the_benchmark() -> None:
    with pytest.raises(BenchError, match="did not answer"), open_pair("shm") as pair:
        pair.peer.submit("get", key="never", timeout=60.0, verify="auto").result(0.1)


def test_keygen_names_the_new_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["keygen", "keys", "producer"])
    captured = capsys.readouterr()
    assert captured.err == ("kvlink-bench: keygen has moved; use kvlink keygen DIRECTORY NAME\n")
    assert captured.out == ""


def test_an_interrupted_run_wakes_its_reader() -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupt_a_waiting_pair()


def _interrupt_a_waiting_pair() -> None:
    with open_pair("shm") as pair:
        pair.peer.submit("get", key="never", timeout=60.0, verify="auto")
        pair.wait_until_requested()
        raise KeyboardInterrupt
