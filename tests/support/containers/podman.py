"""Containers of podman, each with an engine state of its own, whose root is this machine's.

The root is made of bind mounts (`namespaces.bound_root`), so that no image is fetched.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from support.containers.namespaces import SHARED, bound_root
from support.faults.peer_commands import start_peer

if TYPE_CHECKING:
    from collections.abc import Mapping

_OWN_CGROUPS = """
if [ ! -e /sys/fs/cgroup/cgroup.controllers ]; then  # crun refuses a mixture of both versions
    umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup
fi"""


class Container:
    """A process of `python -m support.faults.peer_commands` in a container; `peer` is its peer.

    It shares nothing with the others but the directory `shared`, which it sees as `SHARED`.
    """

    def __init__(self, shared: str, uid: int = 0, group: int = 0):
        self._state = Path(tempfile.mkdtemp(prefix="kvl-podman-"))
        self._pid = self._state / "pid"
        try:
            prefix = command(self._state, {shared: SHARED}, uid, group)
            self.peer = start_peer(prefix=prefix)
        except BaseException:
            shutil.rmtree(self._state)
            raise

    def kill(self) -> None:
        """Send SIGKILL to the container's first process, and wait until podman has noticed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(self._pid.read_text()), signal.SIGKILL)
        self.peer.process.wait(120)

    def close(self) -> None:
        """End the container, and remove what podman kept of it."""
        if self.peer.process.poll() is None:
            self.kill()
        self.peer.close()
        shutil.rmtree(self._state)


def command(
    state: Path, volumes: Mapping[str, str], uid: int = 0, group: int = 0
) -> tuple[str, ...]:
    """The command that runs another one in a container, which has these `volumes` by their paths.

    What podman keeps of it lies in `state`, with its pid in the file `pid`.
    """
    run, most = state / "run", resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    podman = ["podman", "--root", f"{state}/root", "--runroot", str(run), "--tmpdir", f"{run}/t"]
    podman += ["--storage-driver=vfs", "--cgroup-manager=cgroupfs", "--events-backend=none"]
    podman += ["run", "--rm", "--interactive", "--pidfile", f"{state}/pid", "--read-only"]
    podman += ["--cgroups=disabled", "--network=none", "--cap-drop=all", "--log-driver=none"]
    podman += ["--security-opt=no-new-privileges", "--read-only-tmpfs=false"]
    podman += [f"--ulimit=nofile={min(1024, most)}", "--ulimit=nproc=1024"]
    podman += [f"--user={uid}:{uid}", f"--group-add={group}", "--env=PYTHONPATH"]
    for source, target in volumes.items():
        podman += ["--volume", f"{source}:{target}"]
    podman += ["--rootfs", f"{state}/rootfs"]
    lines = ["set -e", *bound_root(f"{state}/rootfs"), _OWN_CGROUPS]
    lines += ["mount -t tmpfs locks /dev/shm", f'exec {shlex.join(podman)} "$@"']
    return ("unshare", "--mount", "sh", "-c", "\n".join(lines), "sh")


def missing() -> str:
    """Return why no container can be run here; "" if one can."""
    if os.geteuid() != 0:
        return "containers are run as root"
    if shutil.which("podman") is None:
        return "'podman' is missing: apt install podman crun"
    with tempfile.TemporaryDirectory(prefix="kvl-") as shared:
        try:
            Container(shared).close()
        except Exception as error:
            return f"podman runs no container here: {error}"
    return ""
