"""Processes in namespaces and in a root of their own, as a container runtime makes them.

`unshare`, `setpriv`, `prlimit` and `pivot_root` (util-linux) make them; that takes root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import omni_kvlink
from support.faults.peer_commands import TESTS, start_peer

if TYPE_CHECKING:
    from omni_kvlink.testing.peer_harness import ProcessPeer

NAMESPACES = ("pid", "ipc", "net", "mount", "user")
SHARED = "/run/kvlink"
"""Where a container has the directory that it shares."""
NOFILE, MEMLOCK = 64, 0
"""The limits of a container's process: descriptors, and bytes that it may lock."""
_TOOLS = ("unshare", "setpriv", "prlimit", "pivot_root", "mount")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
_DEVICES = ("null", "zero", "random", "urandom")


def unshared(*names: str) -> tuple[str, ...]:
    """The command that runs another one in new namespaces, and is killed with it."""
    own = {"pid": ["--pid", "--fork", "--kill-child"], "user": ["--user", "--map-root-user"]}
    flags = [flag for name in names for flag in own.get(name, [f"--{name}"])]
    return ("unshare", *flags, "--")


def contained(
    shared: str, uid: int = 0, group: int = 0, *, maps_root: bool = False, shm: str = ""
) -> tuple[str, ...]:
    """The command that runs another one in a container: all namespaces, and a read-only root.

    It sees `shared` as `SHARED`, the interpreter and this checkout, no /tmp, and no /dev/shm but
    one of the size `shm`. It may not gain privileges, has no capabilities and few descriptors. It
    runs as `uid`, and in a user namespace of its own, in which that is root, if it `maps_root`.
    """
    groups = ["--groups", str(group)] if group else ["--clear-groups"]
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", *groups]
    if maps_root:
        user += ["unshare", "--user", "--map-root-user", "--"]
    closed = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    if uid or maps_root:
        closed = ["setpriv", "--no-new-privs"]
    bounds = ["prlimit", f"--nofile={NOFILE}:{NOFILE}", f"--memlock={MEMLOCK}:{MEMLOCK}"]
    script = "\n".join(
        [*root_lines(shared, shm), f'exec {shlex.join([*user, *closed, *bounds])} "$@"']
    )
    return (*unshared("mount", "pid", "ipc", "net", "uts"), "sh", "-c", script, "sh")


def root_lines(shared: str, shm: str) -> list[str]:
    """The lines of a shell script that makes a root of its own, and enters it."""
    root = _free_root()
    lines = ["set -e", f"exec 9< {shlex.quote(shared)}", *bound_root(root)]
    lines += [f"mount --bind /proc/self/fd/9 {root}{SHARED}", "exec 9<&-"]
    for name in _DEVICES:
        lines.append(f": > {root}/dev/{name}; mount --bind /dev/{name} {root}/dev/{name}")
    if shm:
        lines.append(f"mkdir {root}/dev/shm; mount -t tmpfs -o size={shm} shm {root}/dev/shm")
    lines.append(f"mount -t proc proc {root}/proc; mount -o remount,bind,ro {root}")
    return [*lines, f"cd {root}", "pivot_root . .", "umount -l ."]


def _free_root() -> str:
    """A directory that a mount may hide, in a mount namespace of its own."""
    directories = "/mnt", tempfile.gettempdir()
    used = _bound_paths()
    return next(
        p for p in directories if os.path.isdir(p) and not any(u.startswith(p) for u in used)
    )


def _bound_paths() -> list[str]:
    python = {sys.prefix, os.path.realpath(sys.prefix), sys.base_prefix}
    checkout = {str(Path(omni_kvlink.__file__).parents[1]), str(TESTS.parent)}
    return [path for path in [*_SYSTEM, *sorted(python | checkout)] if os.path.exists(path)]


def bound_root(root: str) -> list[str]:
    """The lines that mount a root at a path: the system's programs, Python, and this checkout."""
    bound = _bound_paths()
    made = [f"{root}{path}" for path in (*bound, SHARED, "/proc", "/dev", "/sys")]
    return [
        f"mkdir -p {root}; mount -t tmpfs -o mode=755 root {root}",
        shlex.join(["mkdir", "-p", *made]),
        *(shlex.join(["mount", "--rbind", path, f"{root}{path}"]) for path in bound),
    ]


def missing(command: tuple[str, ...]) -> str:
    """Return why nothing can be run by this command here; "" if it can."""
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"{tool!r} is missing: apt install util-linux"
    done = subprocess.run(
        [*command, "true"], capture_output=True, text=True, check=False, timeout=60
    )
    return f"the kernel does not let it: {done.stderr.strip()}" if done.returncode else ""


def start(command: tuple[str, ...]) -> ProcessPeer:
    """Start a peer by a command of this file."""
    return start_peer(prefix=command)


def host_pid(peer: ProcessPeer) -> int:
    """The id that the process of a peer's commands has here, outside its namespaces."""
    [pid] = [
        child.pid
        for child in psutil.Process(peer.process.pid).children(recursive=True)
        if not child.children()
    ] or [peer.process.pid]
    return int(pid)


def mapped_memory(pid: int) -> list[str]:
    """What a process has mapped of links' memory files."""
    return [
        line
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "memfd:kvlink" in line
    ]
