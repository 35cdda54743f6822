"""`kvlink doctor URL` and `--serve`: real producers, and what keeps a link from being opened."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from omni_kvlink import KVLink
from omni_kvlink._version import __version__
from omni_kvlink.cli.commands import run
from omni_kvlink.connectors.control.keys import generate
from omni_kvlink.connectors.protocol.messages import own_hello
from omni_kvlink.connectors.shm.rendezvous import NamedListener
from omni_kvlink.doctor.examination import examine
from omni_kvlink.doctor.inquiry import Inquiry
from support.connectors.shm_unauthorized import Raw
from support.connectors.zmq_addresses import free_port
from support.processes.command_process import Terminal
from support.processes.doctor_process import wrong_findings
from support.processes.fork_server import new_interpreters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.doctor.report import Finding, HealthReport


@pytest.fixture
def folder(sockets: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's runtime directory; no socket is left in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
    yield Path(sockets)
    with contextlib.suppress(FileNotFoundError):
        (Path(sockets) / "kvlink" / "user.secret").unlink(missing_ok=True)
        (Path(sockets) / "kvlink").rmdir()


@contextlib.contextmanager
def served(url: str) -> Iterator[str]:
    """`kvlink doctor --serve` in a process of its own; the URL to connect to."""
    command = [sys.executable, "-m", "omni_kvlink.cli", "doctor", "--serve", url]
    with new_interpreters():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        found = re.match(r"serving (\S+); Ctrl-C ends it", process.stdout.readline())
        try:
            assert found
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 128 + signal.SIGTERM


def look(*urls: str, **question: Any) -> HealthReport:
    return examine(Inquiry(urls=urls, areas=("links",), **question))


def by_name(report: HealthReport) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


def only_wrong(report: HealthReport) -> Finding:
    """The one wrong finding, which has a cure."""
    [finding] = wrong_findings(report)
    assert finding.cure
    return finding


def url_of(scheme: str) -> str:
    name = f"doctor-{os.getpid()}"
    if scheme == "auto":
        return f"auto://{name}?tcp=127.0.0.1:{free_port()}"
    return f"shm://{name}" if scheme == "shm" else f"{scheme}://127.0.0.1:0"


@pytest.mark.parametrize("scheme", ["shm", "zmq+tcp", "auto"])
def test_a_link_is_measured(scheme: str, folder: Path) -> None:
    with served(url_of(scheme)) as url:
        report = look(url, seconds=0.1, timeout=60.0)
    assert report.healthy, report.text()
    found = by_name(report)
    numbers = re.search(r"incarnation (\w{16})(, pid (\d+))?", found["producer"].text)
    assert numbers
    pid = re.search(r"omni_kvlink (\S+), pid (\d+) of uid", found["peer"].text)
    assert pid
    assert pid[1] == __version__
    assert (numbers[3] or pid[2]) == pid[2]
    assert bool(numbers[3]) is (scheme != "zmq+tcp"), "over a socket the kernel tells the process"
    assert re.match(r"\d+ µs, the median of", found["round trip"].text)
    assert len(re.findall(r"[\d.]+ GB/s", found["bandwidth"].text)) == 3
    near = {"shm": "shm, as", "zmq+tcp": "both ends share a kernel: auto://", "auto": "shm: this"}
    assert near[scheme] in found["path"].text


def test_a_producer_that_is_no_doctor(folder: Path) -> None:
    with KVLink.serve(url_of("shm")) as producer:
        report = look(producer.url, timeout=0.1)
    assert report.healthy
    assert "--serve URL" in by_name(report)["payloads"].text
    assert str(os.getpid()) in by_name(report)["producer"].text


def test_ctrl_c_ends_the_serving(folder: Path) -> None:
    terminal = Terminal(("kvlink", "doctor", "--serve", "shm://doctor"), folder)
    terminal.wait_for(b"serving shm://doctor")
    terminal.press_ctrl_c()
    status, shown = terminal.wait()
    assert (status, terminal.session()) == (130, [])
    assert shown.endswith("kvlink: interrupted\r\n")
    assert not list(folder.glob("kvlink/doctor*"))


# Faults


def test_a_misspelt_option_of_a_url(folder: Path) -> None:
    finding = only_wrong(look("shm://a?quotta=1MB"))
    assert "did you mean quota?" in finding.text


@pytest.mark.parametrize("url", ["shm", "shn://a", "zmq+tcp://nowhere"])
def test_what_is_no_url(url: str, folder: Path) -> None:
    assert only_wrong(look(url, timeout=0.1)).area == "links"


def test_nobody_serves_the_name(folder: Path) -> None:
    finding = only_wrong(look("shm://nobody"))
    assert f"there is no {folder}/kvlink" in finding.text
    assert not (folder / "kvlink").exists(), "an examination leaves nothing"
    (folder / "kvlink").mkdir(mode=0o700)
    finding = only_wrong(look("shm://nobody", timeout=0.1))
    assert (finding.name, "XDG_RUNTIME_DIR" in finding.cure) == ("connection", True)
    assert finding.text.startswith(f"nobody serves {folder}/kvlink/nobody.sock")


def test_nothing_listens_on_loopback(folder: Path) -> None:
    finding = only_wrong(look(f"zmq+tcp://127.0.0.1:{free_port()}", timeout=0.1))
    assert finding.name == "connection"
    assert finding.text.endswith("nobody serves it")
    assert os.readlink("/proc/self/ns/net") in finding.cure
    assert "--network=host" in finding.cure


def test_a_wrong_key(folder: Path, tmp_path: Path) -> None:
    admitted = tmp_path / "admitted"
    for name in ("producer", "reader", "stranger"):
        generate(str(tmp_path), name)
    admitted.mkdir()
    (tmp_path / "reader.public").rename(admitted / "reader.public")
    url, secret = "zmq+tcp://127.0.0.1:0", tmp_path / "producer.secret"
    with KVLink.serve(url, keys=secret, peers=admitted) as producer:
        link = f"{producer.url}?peers={tmp_path}/producer.public&keys={tmp_path}"
        finding = only_wrong(look(f"{link}/stranger.secret", timeout=10.0))
        assert "refused this side's key" in finding.text
        assert "in the producer's peers= directory" in finding.cure
        assert look(f"{link}/reader.secret", timeout=10.0).healthy
        other = f"{producer.url}?peers={tmp_path}/stranger.public&keys={tmp_path}/reader.secret"
        finding = only_wrong(look(other, timeout=1.0))
        assert "check keys= and peers= of both sides" in finding.cure


def test_another_protocol(folder: Path) -> None:
    (folder / "kvlink").mkdir(mode=0o700)
    listener = NamedListener(str(folder / "kvlink" / "future.sock"))
    listener.sock.settimeout(60)

    def answer() -> None:
        sock, _ = listener.sock.accept()
        with sock:
            Raw(sock).receive()
            Raw(sock).send(msgspec.structs.replace(own_hello(), versions=(7, 9)))
            Raw(sock).is_dropped()

    thread = threading.Thread(target=answer)
    thread.start()
    finding = only_wrong(look("shm://future", timeout=60.0))
    thread.join()
    listener.close()
    assert finding.name == "protocol"
    assert "speaks protocol 7 to 9" in finding.text
    assert __version__ in finding.cure


def test_a_full_quota(folder: Path) -> None:
    with served(f"{url_of('shm')}?quota=1MB") as url:
        finding = only_wrong(look(url, timeout=60.0))
    assert "the quota is full" in finding.text
    assert finding.cure == "raise quota= of the producer"


def test_a_reader_whose_quota_is_full(folder: Path) -> None:
    with served("zmq+tcp://127.0.0.1:0") as url:
        finding = only_wrong(look(f"{url}?quota=1MB", timeout=60.0))
    assert "quota" in f"{finding.text} {finding.cure}"


def test_no_ucxx(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from omni_kvlink.connectors import ucx

    if ucx.unavailable() is None:
        pytest.skip("ucxx is installed")
    assert run(["doctor", "--only=links", "ucx://127.0.0.1:1?trusted_network=true"]) == 1
    assert "pip install 'omni-kvlink[ucx]'" in " ".join(capsys.readouterr().out.split())
