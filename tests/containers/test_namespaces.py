"""A producer and a reader that share one directory, and no namespace: as two containers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import ConnectorError, PeerLostError, TransferFailed
from omni_kvlink.testing.caches import Recipe, fingerprint, sized
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import expect, until
from support.containers import namespaces
from support.containers.namespaces import (
    MEMLOCK,
    NAMESPACES,
    NOFILE,
    SHARED,
    contained,
    host_pid,
    mapped_memory,
    unshared,
)
from support.faults.leak_checks import left_over, shm_files
from support.faults.peer_commands import TESTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.testing.peer_harness import ProcessPeer

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and mounts need root")
URL = "shm://container"
PAYLOAD = sized("k", 8 << 20, seed=3)
CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def shared() -> Iterator[str]:
    """The directory that both share; a killed producer may leave its socket and its lock file."""
    directory, before = tempfile.mkdtemp(prefix="kvl-"), shm_files()
    yield directory
    left = os.listdir(directory)
    shutil.rmtree(directory)
    assert all(name.endswith((".sock", ".sock.lock")) for name in left), left
    until(lambda: not left_over(before), "no file of these processes in /dev/shm is left", 60)


@pytest.fixture
def begin() -> Iterator[Callable[..., ProcessPeer]]:
    """`begin(command)` starts a peer; skips where the kernel does not let it."""
    peers: list[ProcessPeer] = []

    def start(command: tuple[str, ...]) -> ProcessPeer:
        why = namespaces.missing(command)
        if why:
            pytest.skip(why)
        peers.append(namespaces.start(command))
        return peers[-1]

    yield start
    for peer in peers:
        if peer.process.poll() is None:
            kill(peer)
        peer.close()


def kill(peer: ProcessPeer) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(host_pid(peer), signal.SIGKILL)
    peer.process.wait(PATIENCE)


def serve(peer: ProcessPeer, directory: str, **options: Any) -> RemoteLink:
    options = {"quota": 64 << 20, "inline": 0, **options}
    peer.call("serve", link="p", url=URL, directory=directory, **options)
    return RemoteLink(peer, "p")


def connect(peer: ProcessPeer, directory: str, **options: Any) -> RemoteLink:
    peer.call("connect", link="r", url=URL, timeout=PATIENCE, directory=directory, **options)
    return RemoteLink(peer, "r")


def check_transfer(producer: RemoteLink, reader: RemoteLink, recipe: Recipe = PAYLOAD) -> None:
    """A payload arrives bit-exact, and its memory is free when it was released."""
    producer.call("put", recipe=recipe.to_dict())
    assert reader.call("get", key=recipe.key, timeout=PATIENCE) == fingerprint(recipe.make())
    producer.peer.call("wait", key=recipe.key, timeout=PATIENCE)
    assert producer.call("stats")["memory"]["used"] == 0


@pytest.mark.parametrize("name", NAMESPACES)
def test_another_namespace(begin: Callable[..., ProcessPeer], shared: str, name: str) -> None:
    producer, reader = begin(unshared(name)), begin(unshared(name))
    kind = {"mount": "mnt"}.get(name, name)
    spaces = {
        os.readlink(f"/proc/{pid}/ns/{kind}")
        for pid in (host_pid(producer), host_pid(reader), os.getpid())
    }
    assert len(spaces) == 3
    check_transfer(serve(producer, shared), connect(reader, shared))


@pytest.mark.parametrize("shm", ["", "4k"])
@pytest.mark.parametrize("maps_root", [False, True])
def test_every_namespace(
    begin: Callable[..., ProcessPeer], shared: str, shm: str, maps_root: bool
) -> None:
    """And no /tmp, a read-only root, no capabilities, few descriptors: one payload of each kind."""
    if maps_root:
        os.chown(shared, 1000, 1000)
    container = contained(shared, 1000 if maps_root else 0, maps_root=maps_root, shm=shm)
    producer, reader = begin(container), begin(container)
    kinds = (
        ("user", "pid", "ipc", "net", "mnt", "uts") if maps_root else ("pid", "ipc", "net", "mnt")
    )
    for kind in kinds:
        pids = (host_pid(producer), host_pid(reader), os.getpid())
        assert len({os.readlink(f"/proc/{pid}/ns/{kind}") for pid in pids}) == 3
    for pid in (host_pid(producer), host_pid(reader)):
        root, status = Path(f"/proc/{pid}/root"), Path(f"/proc/{pid}/status").read_text()
        limit_lines = Path(f"/proc/{pid}/limits").read_text()
        assert "NoNewPrivs:\t1" in status
        assert f"Max open files            {NOFILE} " in limit_lines
        assert f"Max locked memory         {MEMLOCK} " in limit_lines
        assert (root / "tmp").exists() is str(TESTS).startswith("/tmp/")  # it sees this checkout
        assert (root / "dev/shm").exists() is bool(shm)
        mounts = Path(f"/proc/{pid}/mounts").read_text().splitlines()
        assert any(line.split()[1] == "/" and line.split()[3].startswith("ro") for line in mounts)
    ends = serve(producer, SHARED), connect(reader, SHARED)
    check_transfer(*ends)
    check_transfer(*ends, Recipe("bundle", bundle=True, seed=5))
    check_transfer(*ends, Recipe("tensors", tensors=True, seed=6))
    assert ends[0].call("stats")["refused"] == {}


def test_a_reader_is_killed(begin: Callable[..., ProcessPeer], shared: str) -> None:
    """No pidfd of it can be had: its socket's hang-up hands what it held to the next reader."""
    producer, reader = begin(contained(shared)), begin(contained(shared))
    sending, held = serve(producer, SHARED), connect(reader, SHARED)
    for key, ttl in (("k", 600.0), ("lost", 0.1)):
        sending.call("put", recipe=sized(key, 8 << 20).to_dict(), ttl=ttl)
        held.call("hold", key=key, timeout=PATIENCE)
    assert not _pidfds(host_pid(producer))
    kill(reader)
    expect(
        TransferFailed,
        lambda: producer.call("wait", key="lost", timeout=PATIENCE),
        mentions=("expired", "1 came and left it unread"),
    )
    other = connect(begin(contained(shared)), SHARED)
    got = other.call("get", key="k", timeout=PATIENCE)
    assert got == fingerprint(sized("k", 8 << 20).make())
    producer.call("wait", key="k", timeout=PATIENCE)
    assert sending.call("stats")["memory"]["used"] == 0
    assert sending.call("stats")["readers"] == 1


def test_a_producer_is_killed(begin: Callable[..., ProcessPeer], shared: str) -> None:
    """What its reader holds stays as it was; a get that waits is told; memory goes with both."""
    producer, reader = begin(contained(shared)), begin(contained(shared))
    sending, reading = serve(producer, SHARED), connect(reader, SHARED)
    sending.call("put", recipe=PAYLOAD.to_dict())
    reading.call("hold", key="k", timeout=PATIENCE)
    before = reader.call("hash_held", key="k")
    waiting = reading.submit("get", key="never", timeout=PATIENCE)
    until(lambda: sending.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    assert not _pidfds(host_pid(reader))
    kill(producer)
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    assert reader.call("hash_held", key="k") == before
    assert mapped_memory(host_pid(reader))
    reader.call("release", key="k")
    until(lambda: not mapped_memory(host_pid(reader)), "nothing of it is mapped any more")
    again = serve(begin(contained(shared)), SHARED)
    check_transfer(again, reading, sized("next", 8 << 20))


def _pidfds(pid: int) -> list[str]:
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if "pidfd" in link]


def test_users_that_no_namespace_shares(begin: Callable[..., ProcessPeer], shared: str) -> None:
    """Each sees the other as uid 65534: refused, until both list that uid."""
    os.chown(shared, 0, 3000)
    os.chmod(shared, 0o2770)
    producer, reader = (begin(contained(shared, uid, 3000, maps_root=True)) for uid in (1000, 2000))
    listed = {"allow_uids": [65534]}
    serve(producer, SHARED, **listed)
    error = expect(ConnectorError, lambda: connect(reader, SHARED))
    assert "must be a directory of uid 0, it is of uid 65534" in str(error)
    error = expect(ConnectorError, lambda: connect(reader, SHARED, allow_uids=[7]))
    assert "allow_uids=" in str(error)
    check_transfer(RemoteLink(producer, "p"), connect(reader, SHARED, **listed))


def test_one_user_in_two_mappings(begin: Callable[..., ProcessPeer], shared: str) -> None:
    """Root in its user namespace, uid 1000 outside: the kernel's user counts, not its number."""
    os.chown(shared, 1000, 1000)
    producer = begin(contained(shared, 1000))
    reader = begin(contained(shared, 1000, maps_root=True))
    check_transfer(serve(producer, SHARED), connect(reader, SHARED))


@pytest.mark.parametrize("users", [(0, 1000), (1000, 0)])
def test_two_users(begin: Callable[..., ProcessPeer], shared: str, users: tuple[int, int]) -> None:
    os.chown(shared, 0, 3000)
    os.chmod(shared, 0o2770)
    producer, reader = (begin(contained(shared, uid, 3000)) for uid in users)
    check_transfer(
        serve(producer, SHARED, allow_uids=[users[1]]),
        connect(reader, SHARED, allow_uids=[users[0]]),
    )


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 40 MiB; skips where none can be made."""
    is_v1 = (CGROUPS / "memory" / "memory.limit_in_bytes").exists()
    made = (CGROUPS / "memory" if is_v1 else CGROUPS) / f"kvl-{os.getpid()}"
    limit = made / ("memory.limit_in_bytes" if is_v1 else "memory.max")
    try:
        made.mkdir()
        limit.write_text(str(40 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield made
    until(lambda: not (made / "cgroup.procs").read_text(), "its processes have ended")
    made.rmdir()


def test_a_memory_limit_below_the_payload(
    begin: Callable[..., ProcessPeer], shared: str, small_cgroup: Path
) -> None:
    """A reader is charged nothing for what it reads: the producer's container is."""
    producer, reader = begin(contained(shared)), begin(contained(shared))
    ends = serve(producer, SHARED, quota=256 << 20), connect(reader, SHARED)
    check_transfer(*ends, Recipe("warm"))
    (small_cgroup / "cgroup.procs").write_text(str(host_pid(reader)))
    check_transfer(*ends, sized("k", 96 << 20))
    assert str(host_pid(reader)) in (small_cgroup / "cgroup.procs").read_text().split()
    kill(reader)
