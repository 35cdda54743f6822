"""How the commands behave when something is wrong."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from omni_kvlink.bench.cli import main
from omni_kvlink.bench.errors import BenchError, ReaderError
from omni_kvlink.bench.pair import ProcessPeer, open_pair


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--connector", "pigeon"], "UnavailableError: no connector 'pigeon'"),
        (
            ["latency", "--connector", "inproc", "--preset", "tiny", "--copier", "elves"],
            "no copier 'elves'",
        ),
        (["latency", "--url", "shm://a b", "--preset", "tiny"], "shm://a b"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [[], ["latency", "--rounds", "0"], ["latency", "--dtype=x"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_help_says_what_paged_is() -> None:
    command = [sys.executable, "-m", "omni_kvlink.bench", "latency", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "blocks of 16 tokens in random order" in " ".join(done.stdout.split())


def test_a_reader_that_fails_lives_on() -> None:
    with open_pair("shm") as pair:
        with pytest.raises(ReaderError, match="TransferTimeout"):
            pair.peer.ask(do="get", key="never", timeout=0.05, verify="auto")
        assert pair.peer.ask(do="ping")["received"] > 0


def test_a_reader_that_ended_is_reported() -> None:
    with contextlib.closing(ProcessPeer()) as peer:
        peer._process.kill()
        with pytest.raises(BenchError, match="ended with status -9"):
            peer.answer(timeout=20.0)


def test_an_interrupted_run_wakes_its_reader() -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupt_a_waiting_pair()


def _interrupt_a_waiting_pair() -> None:
    with open_pair("shm") as pair:
        pair.peer.tell(do="get", key="never", timeout=60.0, verify="auto")
        pair.await_reader()
        raise KeyboardInterrupt
