"""A Prometheus that has scraped a producer and a consumer answers each expression with data.

Those of the dashboard, `examples/grafana/kvlink.json`, and of the symptoms in docs/operations.md.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from omni_kvlink.testing.rig import until
from support.connectors.zmq_addresses import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD, PAGE = ROOT / "examples/grafana/kvlink.json", ROOT / "docs/operations.md"
PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(not DASHBOARD.exists(), reason="installed without the sources")


def of_dashboard() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [one.replace("$__rate_interval", "5m") for one in found]


def of_page() -> list[str]:
    table = PAGE.read_text().partition("## What to do")[2]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    return [one for row in rows for one in re.findall(r"`([^`]+)`", row[4]) if "kvlink_" in one]


def families() -> set[str]:
    """The metrics that the guide lists."""
    guide = (ROOT / "docs/guides/metrics.md").read_text()
    return set(re.findall(r"^\| `(kvlink_\w+)` \|", guide, re.MULTILINE))


class Server(NamedTuple):
    """A Prometheus, by its port."""

    port: int

    def request(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def has_data(self, expression: str) -> bool:
        return bool(self.request("query", query=expression)["result"])

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):  # also urllib's errors
            return len(self.request("query", query="up == 1")["result"]) == 2
        return False


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed at the end of the block, unless it has ended."""
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if PROMETHEUS is None:
        pytest.skip("prometheus is missing: make test-prometheus")
    pytest.importorskip("prometheus_client")
    folder = tmp_path_factory.mktemp("prometheus")
    sockets = folder / "sockets"
    sockets.mkdir(0o700)
    ports = {role: free_port() for role in ("producer", "consumer")}
    targets = [{"targets": [f"127.0.0.1:{port}" for port in ports.values()]}]
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
        "scrape_configs": [{"job_name": "kvlink", "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    server = Server(free_port())
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml"]
    command += [
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{server.port}",
    ]
    program = [sys.executable, "-m", "support.telemetry.measured_link"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        for role, port in ports.items():
            arguments = [*program, role, "shm://measured", str(sockets), str(port)]
            process = stack.enter_context(running(arguments, **pipes))
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        with (folder / "log").open("wb") as log:
            stack.enter_context(running(command, stdout=log, stderr=log))
            until(server.is_up, "Prometheus has scraped both")
            yield server


@pytest.mark.parametrize(
    "expression",
    sorted({*of_dashboard(), *of_page()} if PAGE.exists() and DASHBOARD.exists() else ()),
)
def test_an_expression_has_data(expression: str, server: Server) -> None:
    until(lambda: server.has_data(expression), expression)


def test_each_metric_of_the_guide_is_scraped_and_shown(server: Server) -> None:
    assert len(families()) == 14
    suffixes = ("", "_bucket")
    for name in families():
        until(lambda name=name: any(server.has_data(name + end) for end in suffixes), name)  # type: ignore[misc]
        assert any(name in expression for expression in of_dashboard()), name


def test_metrics_are_described_as_prometheus_wants(server: Server) -> None:
    described = server.request("metadata")
    ours = {name: about[0] for name, about in described.items() if name.startswith("kvlink_")}
    assert {name.removesuffix("_total") for name in ours} >= {
        name.removesuffix("_total") for name in families()
    }
    assert all(about["help"].endswith(".") for about in ours.values())
