"""`kvlink-bench serve` and `--connect`: the two ends of a measurement, each started by itself."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.bench.reader import ReaderCommands
from omni_kvlink.bench.remote import open_remote, set_clock
from omni_kvlink.bench.report import BenchError
from omni_kvlink.testing.peer_harness import ThreadPeer
from support.network.cable import Cable, missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BENCH = (sys.executable, "-m", "omni_kvlink.bench")
TINY = ("latency", "--preset", "tiny", "--rounds", "2", "--warmup", "1", "--connector", "zmq+tcp")
NO_NAMESPACES = missing()


@contextlib.contextmanager
def serving(host: str, prefix: Sequence[str] = (), *options: str) -> Iterator[tuple[Any, str]]:
    """The process of `serve`, and the address that it prints."""
    command = [*prefix, *BENCH, "serve", f"tcp://{host}:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            printed = process.stderr.readline().decode()
            found = re.search(r"--connect (tcp://\S+)", printed)
            assert found, printed
            yield process, found[1]
        finally:
            process.terminate()


def measure(url: str, path: Path, prefix: Sequence[str] = ()) -> dict[str, Any]:
    command = [*prefix, *BENCH, *TINY, "--connect", url, "--json", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    return results


def check(results: dict[str, Any]) -> None:
    assert results["milliseconds"]["total"]["min"] > 0
    assert results["zmq_trip_ms"]["min"] > 0
    assert results["zmq_tcp_ms"]["min"] > 0
    note = "the reader is kvlink-bench serve's; the same clock at both ends"
    assert note in results["notes"]


def test_two_processes(tmp_path: Path) -> None:
    with serving("127.0.0.1", (), "--connections", "1") as (process, url):
        with pytest.raises(BenchError, match="is this the token that it has printed"):
            open_remote(url + "0")
        check(measure(url, tmp_path / "result.json"))
        assert process.wait(60) == 0
        shown = process.stdout.read().decode()
        assert "served    1 connections" in shown
        assert "refused   1 connections" in shown


@pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES or "")
def test_two_network_namespaces(tmp_path: Path) -> None:
    with contextlib.closing(Cable()) as cable:
        left, right = (("ip", "netns", "exec", name) for name in (cable.left, cable.right))
        with serving(cable.address[cable.left], left) as (_, url):
            check(measure(url, tmp_path / "result.json", right))


def test_nobody_there_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    command = [*BENCH, *TINY, "--connect", f"tcp://127.0.0.1:{port}/token"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert f"no answer from kvlink-bench serve at tcp://127.0.0.1:{port}" in done.stderr


class OtherClock(ReaderCommands):
    """A reader whose clock is five seconds behind."""

    def boot(self) -> str:
        return "another"

    def _now(self) -> int:
        return super()._now() - 5_000_000_000


def test_the_clock_of_another_host_is_converted() -> None:
    with contextlib.closing(ThreadPeer(OtherClock(own_thread=True), concurrent=False)) as peer:
        assert peer.call("ping") < time.monotonic_ns() - 4_000_000_000
        clock = set_clock(peer)
        within = re.fullmatch(r"the reader's clock by round trips, within (\d+) micro.*", clock)
        assert within
        slack = 1000 * (int(within[1]) + 1)
        sent = time.monotonic_ns()
        moment = peer.call("ping")
        assert sent - slack < moment < time.monotonic_ns() + slack


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:7300", "tcp://127.0.0.1", "shm://name"])
def test_an_address_without_a_token_is_refused(url: str) -> None:
    command = [*BENCH, *TINY, "--connect", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "argument --connect: wanted tcp://HOST:PORT" in done.stderr
    assert done.stderr.count("\n") == 1
