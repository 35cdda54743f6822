"""Two containers of podman with nothing in common but a volume."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import PeerLostError
from omni_kvlink.models.bagel import make_tiny_checkpoint
from omni_kvlink.testing.caches import Recipe, fingerprint, sized
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import expect, until
from support.containers import podman
from support.containers.namespaces import SHARED
from support.containers.podman import Container, command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEMO = Path(__file__).parents[2] / "examples" / "bagel_two_stage.py"
URL, GROUP = "shm://podman", 3000
PAYLOAD = sized("k", 8 << 20, seed=4)
missing = cache(podman.missing)


@pytest.fixture
def shared() -> Iterator[str]:
    """A volume of mode 2770 of the group of both."""
    directory = tempfile.mkdtemp(prefix="kvl-")
    os.chown(directory, 0, GROUP)
    os.chmod(directory, 0o2770)
    yield directory
    left = os.listdir(directory)
    shutil.rmtree(directory)
    assert all(name.endswith((".sock", ".sock.lock")) for name in left), left


@pytest.fixture
def begin(shared: str) -> Iterator[Callable[[int], Container]]:
    """`begin(uid)` runs a container; skips where podman runs none."""
    why, containers = missing(), list[Container]()
    if why:
        pytest.skip(why)

    def run(uid: int) -> Container:
        containers.append(Container(shared, uid, GROUP))
        return containers[-1]

    yield run
    for container in containers:
        container.close()


def serve(container: Container, reader_uid: int) -> RemoteLink:
    options = {"quota": 64 << 20, "inline": 0, "directory": SHARED, "allow_uids": [reader_uid]}
    container.peer.call("serve", link="p", url=URL, **options)
    return RemoteLink(container.peer, "p")


def connect(container: Container, producer_uid: int) -> RemoteLink:
    options = {"directory": SHARED, "allow_uids": [producer_uid], "timeout": PATIENCE}
    container.peer.call("connect", link="r", url=URL, **options)
    return RemoteLink(container.peer, "r")


def check_transfer(producer: RemoteLink, reader: RemoteLink, recipe: Recipe = PAYLOAD) -> None:
    producer.call("put", recipe=recipe.to_dict())
    assert reader.call("get", key=recipe.key, timeout=PATIENCE) == fingerprint(recipe.make())
    producer.peer.call("wait", key=recipe.key, timeout=PATIENCE)
    assert producer.call("stats")["memory"]["used"] == 0


@pytest.mark.parametrize("users", [(0, 1000), (1000, 0), (1000, 2000)])
def test_two_users(begin: Callable[[int], Container], users: tuple[int, int]) -> None:
    producer, reader = (begin(uid) for uid in users)
    ends = serve(producer, users[1]), connect(reader, users[0])
    check_transfer(*ends)
    check_transfer(*ends, Recipe("bundle", bundle=True, seed=5))


def test_either_is_killed(begin: Callable[[int], Container]) -> None:
    """The reader's payload goes to the next one; what the next holds outlives the producer."""
    producer, reader, other = begin(1000), begin(2000), begin(2000)
    sending, held = serve(producer, 2000), connect(reader, 1000)
    sending.call("put", recipe=PAYLOAD.to_dict())
    held.call("hold", key="k", timeout=PATIENCE)
    reader.kill()
    until(lambda: sending.call("stats")["readers"] == 0, "the producer has noticed")
    reading = connect(other, 1000)
    reading.call("hold", key="k", timeout=PATIENCE)
    before = other.peer.call("hash_held", key="k")
    waiting = reading.submit("get", key="never", timeout=PATIENCE)
    until(lambda: sending.call("stats")["transfers"]["waiting"] == 1, "the get arrived")
    producer.kill()
    expect(PeerLostError, lambda: waiting.result(PATIENCE))
    assert other.peer.call("hash_held", key="k") == before
    check_transfer(serve(begin(1000), 2000), reading, sized("next", 8 << 20))


def test_bagel(shared: str, tmp_path: Path) -> None:
    """Its stages, of two users in two containers, compute what one process does."""
    if why := missing():
        pytest.skip(why)
    work = tmp_path / "work"  # the checkpoint, and what the second stage writes
    out, checkpoint = work / "out", make_tiny_checkpoint(work / "tiny")
    out.mkdir()
    out.chmod(0o777)
    for path in checkpoint.iterdir():
        path.chmod(0o644)
    volumes, states = {shared: SHARED, str(work): str(work)}, list[Path]()
    prefixes = list[str]()
    for uid in (0, 2000):
        states.append(Path(tempfile.mkdtemp(prefix="kvl-")))  # podman takes no long path
        prefixes.append(shlex.join(command(states[-1], volumes, uid, GROUP)))
    url = f"shm://bagel?directory={SHARED}&allow_uids=0,2000"
    options = ["--checkpoint", str(checkpoint), "--out", str(out), "--url", url, "--steps", "4"]
    options += ["--prefix-ar", prefixes[0], "--prefix-dit", prefixes[1]]
    done = subprocess.run(
        [sys.executable, str(DEMO), *options],
        env={**os.environ, "TMPDIR": str(work)},  # for the image that the first stage reads
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    for state in states:
        shutil.rmtree(state)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every byte of K and V, every pixel, every token" in done.stdout
