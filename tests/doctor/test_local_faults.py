"""`kvlink doctor` on a healthy machine, and with faults of the machine, the process and the build.

Each fault is a real one, of a process of its own, but for those that only a kernel can make: they
are files below another root.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import omni_kvlink
from omni_kvlink._native import host
from omni_kvlink.cli.commands import run
from omni_kvlink.cli.doctor import AREAS
from omni_kvlink.connectors.control.keys import generate
from omni_kvlink.doctor.examination import examine
from omni_kvlink.doctor.inquiry import Inquiry
from omni_kvlink.doctor.report import Finding, HealthReport, schema
from omni_kvlink.doctor.root import Root
from support.processes.doctor_process import visit, wrong_findings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = Path(omni_kvlink.__file__).parent


@pytest.fixture
def runtime(sockets: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's directory of sockets, which is not there yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
    directory = Path(sockets) / "kvlink"
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def only_wrong(report: HealthReport) -> Finding:
    """The one wrong finding of a report, which has a cure."""
    [finding] = wrong_findings(report)
    assert finding.cure
    assert not report.healthy
    return finding


def look(*areas: str, **question: Any) -> HealthReport:
    return examine(Inquiry(areas=areas, **question))


def fake_root(folder: Path, files: dict[str, str]) -> Root:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Root(str(folder))


# A healthy machine


def test_a_healthy_machine(runtime: Path) -> None:
    status, report = visit("--quota", "64MiB", XDG_RUNTIME_DIR=str(runtime.parent))
    assert (status, wrong_findings(report)) == (0, [])
    assert report.healthy
    areas = {finding.area for finding in report.findings}
    assert areas == {*AREAS} - {"links", "configuration"}
    assert not runtime.exists(), "an examination leaves nothing"


def test_the_document_keeps_to_the_schema(runtime: Path) -> None:
    report = look("memory", "namespaces")
    document = HealthReport.read(report.to_json())
    assert document == report
    published = schema()["$defs"]
    for name, kind in (("HealthReport", HealthReport), ("Finding", Finding)):
        assert [*published[name]["properties"]] == [*kind.__struct_fields__]
        assert published[name]["additionalProperties"] is False
    jsonschema = pytest.importorskip("jsonschema")
    values = json.loads(report.to_json())
    jsonschema.validate(values, schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "healthy": "yes"}, schema())


def test_the_text_fits_eighty_columns(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    report = look("memory", "sockets", "copier", "keys", "namespaces")
    lines = report.text().splitlines()
    wide = [line for line in lines if len(line) > 80]
    assert all(" " not in line.strip() for line in wide), "a path alone may be longer"
    assert lines[-1] == "healthy"
    assert sum(line[:4] in ("  ok", "  no") for line in lines) == len(report.findings)


def test_the_command_prints_cures(
    runtime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--only", "keys", "--keys", str(tmp_path / "no")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  wrong  keys")
    assert any(line.strip().startswith("cure: make it: kvlink keygen") for line in lines)
    assert lines[-1] == "1 wrong"


# Limits of the process


def limited(kind: int, value: int) -> Callable[[], object]:
    return lambda: resource.setrlimit(kind, (value, value))


def test_no_memory_may_be_locked(runtime: Path) -> None:
    found = visit("--only=memory", preexec=limited(resource.RLIMIT_MEMLOCK, 0))
    finding = only_wrong(found.report)
    assert (found.status, finding.name) == (1, "locked memory")
    assert "ulimit -l unlimited" in finding.cure


def test_rdma_needs_locked_memory(runtime: Path) -> None:
    url = "ucx://127.0.0.1:1?ucx_tls=rc,tcp&trusted_network=true"
    half = limited(resource.RLIMIT_MEMLOCK, 1 << 22)
    found = visit("--only=memory", url, preexec=half)
    assert (found.status, only_wrong(found.report).name) == (1, "locked memory")
    assert visit("--only=memory", preexec=half).status == 0


def test_few_open_files(runtime: Path) -> None:
    found = visit("--only=memory", preexec=limited(resource.RLIMIT_NOFILE, 100))
    finding = only_wrong(found.report)
    assert (found.status, finding.name) == (1, "open files")
    assert "ulimit -n" in finding.cure


# Limits of a cgroup: this kernel's own cannot be set by a test


CGROUPS = {
    "v2": ("0::/a/b", "sys/fs/cgroup/a/memory.max", "sys/fs/cgroup/a/memory.current"),
    "v2 of a container": (
        *("0::/docker/1", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ),
    "v1": (
        "4:memory:/a\n0::/",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes",
    ),
}


@pytest.mark.parametrize("version", CGROUPS)
def test_a_small_cgroup(version: str, tmp_path: Path) -> None:
    groups, limit, used = CGROUPS[version]
    files = {"proc/self/cgroup": groups, limit: str(64 << 20), used: str(60 << 20)}
    root = fake_root(tmp_path, {**files, "proc/meminfo": "MemAvailable: 9000000 kB"})
    finding = only_wrong(look("memory", root=root, quota=1 << 30))
    assert finding.name == "cgroup memory"
    assert finding.text == "64 MiB at most, 60 MiB in use, the quota is 1.0 GiB"
    assert limit in finding.cure
    report = look("memory", root=root, quota=32 << 20)  # what is in use may be given back
    assert report.healthy
    assert [one.status for one in report.findings if one.name == "cgroup memory"] == ["note"]
    assert look("memory", root=root, quota=1 << 20).healthy


def test_a_cgroup_without_a_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}
    files["proc/meminfo"] = "MemAvailable: 9000000 kB"
    assert look("memory", root=fake_root(tmp_path, files), quota=1 << 30).healthy


def test_little_memory_is_available(tmp_path: Path) -> None:
    root = fake_root(tmp_path, {"proc/meminfo": "MemAvailable: 1000 kB"})
    assert only_wrong(look("memory", root=root, quota=1 << 30)).name == "available"
    assert look("memory", root=root).healthy, "the default quota is a limit, not a need"


# Directories and sockets


def test_the_directory_is_open_to_others(runtime: Path) -> None:
    runtime.mkdir()
    runtime.chmod(0o777)
    finding = only_wrong(look("sockets"))
    assert finding.name == "directory"
    assert "777" in finding.text
    assert finding.cure.startswith("chmod go-w")
    runtime.chmod(0o700)
    assert look("sockets").healthy


def test_no_such_directory(runtime: Path, tmp_path: Path) -> None:
    missing = tmp_path / "run"
    finding = only_wrong(look("sockets", urls=(f"shm://a?directory={missing}",)))
    assert finding.text == f"there is no directory {missing}"
    assert "start the producer" in finding.cure
    assert not missing.exists()


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_a_stale_socket(kind: socket.SocketKind, runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(runtime / "bagel.sock"))
        listener.listen()
        assert look("sockets").healthy
    finding = only_wrong(look("sockets"))
    assert finding.name == "stale sockets"
    assert finding.text.startswith("bagel.sock: ")
    assert "remove it" in finding.cure


# The build


def test_no_compiled_part(runtime: Path, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "omni_kvlink", ignore=shutil.ignore_patterns("*.so"))
    found = visit("--only=copier", folder=tmp_path, PYTHONPATH=str(tmp_path))
    finding = only_wrong(found.report)
    assert (found.status, finding.name) == (1, "compiled part")
    assert finding.cure == host.CURE
    assert found.report.findings[-1].text.startswith("torch: ")


def test_another_interface_of_the_compiled_part(runtime: Path, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "omni_kvlink")
    source = tmp_path / "omni_kvlink" / "_native" / "host.py"
    source.write_text(source.read_text().replace(f"\nABI = {host.ABI}\n", "\nABI = 99\n"))
    finding = only_wrong(visit("--only=copier", folder=tmp_path, PYTHONPATH=str(tmp_path)).report)
    assert f"has interface {host.ABI}, this package requires 99" in finding.text


@pytest.mark.skipif(host.missing() is not None, reason="there is no compiled part")
def test_unknown_instructions(runtime: Path) -> None:
    found = visit("--only=copier", OMNI_KVLINK_FEATURES="sse9")
    finding = only_wrong(found.report)
    assert (found.status, finding.name) == (1, "compiled part")
    assert host.ENVIRONMENT in finding.text + finding.cure


def test_no_device(runtime: Path) -> None:
    finding = only_wrong(look("gpu", urls=("ucx://127.0.0.1:1?device=cuda:99",)))
    assert finding.name == "devices"


# Packages


def distribution(folder: Path, name: str, version: str) -> None:
    """The metadata of an installed package."""
    path = folder / f"{name}-{version}.dist-info" / "METADATA"
    path.parent.mkdir()
    path.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("name", "version", "cure"),
    [
        ("vllm", "0.99.1", "pip install 'vllm==0.32.*'"),
        ("vllm", "0.3", "pip install 'vllm==0.32.*'"),
        ("vllm_omni", "0.31.0", "pip install 'vllm-omni==0.30.*'"),
        ("transformers", "4.9.9", "pip install 'transformers>=4."),
    ],
)
def test_an_unknown_version(
    name: str, version: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(tmp_path, name, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = only_wrong(look("packages"))
    assert version in finding.text
    assert finding.cure.startswith(cure)


def test_a_known_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "vllm", "0.32.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert look("packages").healthy


def test_no_ucxx_for_a_url_that_needs_it() -> None:
    if look("packages", urls=("ucx://127.0.0.1:1",)).healthy:
        pytest.skip("ucxx is installed")
    finding = only_wrong(look("packages", urls=("ucx://127.0.0.1:1",)))
    assert finding.name == "ucxx"
    assert finding.cure == "pip install 'omni-kvlink[ucx]'"
    assert look("packages", urls=("shm://a",)).healthy


# Keys


def test_key_files(tmp_path: Path) -> None:
    secret, public = generate(str(tmp_path), "a")
    assert look("keys", keys=str(tmp_path)).healthy
    os.chmod(secret, 0o644)
    assert only_wrong(look("keys", keys=str(tmp_path))).cure == "chmod 600 it"
    os.chmod(secret, 0o600)
    Path(public).write_text("no key")
    finding = only_wrong(look("keys", keys=str(tmp_path)))
    assert (finding.name, "kvlink keygen" in finding.cure) == ("a.public", True)


def test_the_keys_of_a_url(tmp_path: Path) -> None:
    secret, public = generate(str(tmp_path), "a")
    url = f"zmq+tcp://127.0.0.1:1?keys={secret}&peers="
    assert look("keys", urls=(url + public,)).healthy
    assert look("keys", urls=(url + str(tmp_path),)).healthy
    (tmp_path / "none").mkdir()
    assert "has no public key" in only_wrong(look("keys", urls=(f"{url}{tmp_path}/none",))).text
    assert only_wrong(look("keys", urls=(f"{url}{tmp_path}/gone",))).name == "peers="


# Namespaces


def test_a_user_without_a_map() -> None:
    if subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode:
        pytest.skip("this kernel or its sandbox lets no user namespace be made")
    found = visit("--only=namespaces", prefix=("unshare", "--user"))
    finding = only_wrong(found.report)
    assert (found.status, finding.name) == (1, "users")
    assert "unshare --map-root-user" in finding.cure


@pytest.mark.parametrize("shift", [0, 1])
def test_another_user_namespace(shift: int, tmp_path: Path) -> None:
    files = {"proc/self/uid_map": f"{os.geteuid() + shift} 100000 65536"}
    report = look("namespaces", root=fake_root(tmp_path, files))
    users = report.findings[0]
    assert users.status == ("wrong" if shift else "note")
    assert report.healthy is not shift
    if not shift:
        assert "is 100000 outside" in users.text


def test_a_process_namespace(tmp_path: Path) -> None:
    root = fake_root(tmp_path, {"proc/self/status": "NSpid:\t4242\t7"})
    assert look("namespaces", root=root).findings[1].status == "note"
