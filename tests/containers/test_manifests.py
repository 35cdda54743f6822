"""The files of examples/containers: what they say of users, directories, options and rights."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import pytest
import yaml

from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.shm.rendezvous import socket_path
from support.faults.peer_commands import TESTS

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = TESTS.parent / "examples" / "containers"
if not FOLDER.exists():
    pytest.skip("installed without the sources", allow_module_level=True)

INSTRUCTIONS = {"FROM", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT"}
SERVICE = {"build", "command", "user", "group_add", "environment", "volumes", "mem_limit"}
SERVICE |= {"network_mode", "read_only", "cap_drop", "security_opt"}
POD = {"restartPolicy", "securityContext", "containers", "initContainers", "volumes", "affinity"}
CONTAINER = {"name", "image", "args", "command", "env", "resources", "securityContext"}
CONTAINER |= {"volumeMounts"}
PODS = list(yaml.safe_load_all((FOLDER / "pod.yaml").read_text()))
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
DOCKERFILE = [
    (line.partition(" ")[0], line.partition(" ")[2])
    for line in (FOLDER / "Dockerfile").read_text().splitlines()
    if line and not line.startswith("#")
]


def options_of(url: str) -> Options:
    """The options of a link's URL, each checked."""
    assert url.startswith("shm://pair?")
    return Options.read(Options.parse(parse_qsl(url.partition("?")[2])))


def check_ends(ends: dict[str, tuple[int, str]], directory: str) -> None:
    """Each side, by its verb with its uid and its URL, lists the other's uid alone."""
    options = {verb: options_of(url) for verb, (_, url) in ends.items()}
    assert set(ends) == {"serve", "read"}
    assert options["serve"].allow_uids == (ends["read"][0],)
    assert options["read"].allow_uids == (ends["serve"][0],)
    assert {one.directory for one in options.values()} == {directory}
    assert ends["serve"][0] != ends["read"][0]


def test_the_dockerfile() -> None:
    """Its directory is as a shared one has to be, and its program is there."""
    assert {name for name, _ in DOCKERFILE} == INSTRUCTIONS
    assert DOCKERFILE[0][0] == "FROM"
    lines = " && ".join(text for name, text in DOCKERFILE if name == "RUN").split(" && ")
    commands = [shlex.split(line) for line in lines]
    assert ["groupadd", "--gid", "3000", "kvlink"] in commands
    assert ["install", "-d", "-m", "2770", "-g", "kvlink", "/run/kvlink"] in commands
    assert commands[0][:2] == ["pip", "install"]
    assert commands[0][-1] == "omni-kvlink"
    named = dict(DOCKERFILE)
    source, target = named["COPY"].split()
    assert (FOLDER / source).exists()
    assert Path(target).parent == Path(named["WORKDIR"])
    assert yaml.safe_load(named["ENTRYPOINT"]) == ["python", source]
    assert named["USER"] == "1000:1000"


def test_the_compose_file() -> None:
    assert set(COMPOSE) == {"services", "volumes"}
    assert COMPOSE["volumes"] == {"kvlink": {}}
    ends: dict[str, tuple[int, str]] = {}
    for service in COMPOSE["services"].values():
        assert set(service) == SERVICE
        assert service["group_add"] == ["3000"]
        assert service["volumes"] == ["kvlink:/run/kvlink"]
        assert (service["network_mode"], service["read_only"]) == ("none", True)
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert re.fullmatch(r"\dg", service["mem_limit"])
        uid, gid = map(int, service["user"].split(":"))
        assert uid == gid
        ends[service["command"][0]] = uid, service["environment"]["KVLINK_URL"]
    check_ends(ends, "/run/kvlink")
    limit = int(COMPOSE["services"]["producer"]["mem_limit"][:-1]) << 30
    assert options_of(ends["serve"][1]).quota < limit


def _end(container: dict[str, Any]) -> tuple[str, tuple[int, str]]:
    """The verb of a container, with its uid and its URL; its rights are as small as they can be."""
    assert set(container) <= CONTAINER
    rights = container["securityContext"]
    assert rights["runAsNonRoot"] is rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert container["volumeMounts"] == [{"name": "kvlink", "mountPath": "/run/kvlink"}]
    [variable] = container["env"]
    assert variable["name"] == "KVLINK_URL"
    return container["args"][0], (rights["runAsUser"], variable["value"])


def test_the_pods() -> None:
    for pod in PODS:
        assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
        assert set(pod["spec"]) <= POD
        assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod["spec"])
    one, *two = (pod["spec"] for pod in PODS)
    assert one["volumes"] == [{"name": "kvlink", "emptyDir": {}}]
    assert one["securityContext"] == {"fsGroup": 3000}
    check_ends(dict(map(_end, one["containers"])), "/run/kvlink/link")
    for spec in two:
        assert spec["securityContext"] == {"supplementalGroups": [3000]}
        host = {"path": "/run/kvlink", "type": "Directory"}
        assert spec["volumes"] == [{"name": "kvlink", "hostPath": host}]
    check_ends(dict(_end(spec["containers"][0]) for spec in two), "/run/kvlink")
    [term] = two[1]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"] == PODS[1]["metadata"]["labels"]


def test_the_pods_by_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for pod in PODS:
        validator.validate(pod, validator.latest_version(), strict=True)


@pytest.fixture
def volume() -> Iterator[Path]:
    """As the kubelet makes an `emptyDir` of a pod with `fsGroup`."""
    directory = Path(tempfile.mkdtemp(prefix="kvl-"))
    os.chown(directory, 0, 3000)
    directory.chmod(0o2777)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_the_directory_of_the_first_container(volume: Path) -> None:
    """The init container's command, in a volume as the kubelet makes it, makes a shared one."""
    [maker] = PODS[0]["spec"]["initContainers"]
    command = [word.replace("/run/kvlink", str(volume)) for word in maker["command"]]
    uid = maker["securityContext"]["runAsUser"]
    subprocess.run(command, check=True, user=uid, group=uid, extra_groups=[3000])
    status = os.stat(volume / "link")
    assert (status.st_uid, status.st_gid) == (uid, 3000)
    assert stat.S_IMODE(status.st_mode) == 0o2770
    assert socket_path("pair", f"{volume}/link", (uid,)) == f"{volume}/link/pair.sock"


def test_the_program(sockets: str) -> None:
    """Both verbs, as two processes of one user."""
    env = {**os.environ, "KVLINK_URL": f"shm://pair?directory={sockets}&quota=64MiB"}
    program = [sys.executable, str(FOLDER / "pair.py")]
    producer = subprocess.Popen([*program, "serve"], env=env)
    try:
        text = subprocess.check_output([*program, "read"], env=env, text=True, timeout=120)
        assert text == "8 payloads, bit-exact\n"
        assert producer.wait(60) == 0
    finally:
        producer.kill()
        producer.wait()
