"""Examines memory: memory files, huge pages, and the limits of the process and its cgroup."""

from __future__ import annotations

import resource
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.memory.mapping import PAGE, Mapping, is_sealed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.doctor.findings import Area
    from omni_kvlink.doctor.inquiry import Inquiry
    from omni_kvlink.doctor.root import Root

_SHMEM = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
_FEW_FILES = 256
"""Descriptors with which a process of a few links comes to its limit."""
_UNLIMITED = 1 << 60
"""Bytes from which a limit is none: cgroup v1 has no other word for it."""


def examine(area: Area, inquiry: Inquiry) -> None:
    """Add the findings; makes a memory file of one page."""
    with area.guarded("memory files"):
        _memory_files(area)
    _huge_pages(area, inquiry.root)
    _locked(area, inquiry)
    _open_files(area)
    _cgroup(area, inquiry)
    _available(area, inquiry)


def mib(nbytes: int) -> str:
    """A number of bytes for people."""
    if nbytes < 1 << 20:
        return f"{nbytes} bytes"
    return (
        f"{nbytes / (1 << 30):,.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.0f} MiB"
    )


def _memory_files(area: Area) -> None:
    mapping = Mapping.shared("kvlink-doctor", PAGE)
    if is_sealed(mapping.fd):
        area.ok("memory files", "memfd_create and its seals work")
    else:
        cure = "run Linux 5.1 or later without a sandbox that lacks F_ADD_SEALS, or use zmq+ipc://"
        area.wrong("memory files", "a memory file cannot be sealed", cure)


def _huge_pages(area: Area, root: Root) -> None:
    choice = root.text(_SHMEM).partition("[")[2].partition("]")[0] or "unknown"
    if choice in ("always", "within_size", "advise", "force"):
        area.ok("huge pages", f"shmem_enabled is {choice}")
    else:
        text = f"shmem_enabled is {choice}: first transfers are faster with `advise` in /{_SHMEM}"
        area.note("huge pages", text)


def _locked(area: Area, inquiry: Inquiry) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    quota = inquiry.quota_nbytes()
    is_rdma = any(link.options.ucx_tls != "tcp" for link in inquiry.links())
    is_enough = limit == resource.RLIM_INFINITY or limit >= quota
    if is_enough:
        area.ok("locked memory", "no limit" if limit < 0 else f"{mib(limit)} may be locked")
    elif limit == 0 or is_rdma:
        cure = "raise it: `ulimit -l unlimited`, docker run --ulimit memlock=-1, LimitMEMLOCK="
        text = f"{mib(limit)} may be locked (RLIMIT_MEMLOCK), the quota is {mib(quota)}: no RDMA"
        area.wrong("locked memory", text, cure)
    else:
        area.note("locked memory", f"{mib(limit)} may be locked: too little for RDMA over ucx://")


def _open_files(area: Area) -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit >= _FEW_FILES or limit == resource.RLIM_INFINITY:
        area.ok("open files", f"up to {limit}" if limit >= 0 else "no limit")
    else:
        cure = f"raise it: `ulimit -n {max(most, 4096)}`, docker run --ulimit nofile=65536"
        area.wrong("open files", f"{limit} at most (RLIMIT_NOFILE), {_FEW_FILES} are needed", cure)


class _MemoryLimit(NamedTuple):
    """The limit of a cgroup, and what it uses, in bytes; `file` has the limit."""

    file: str
    limit: int
    used: int


def _cgroup(area: Area, inquiry: Inquiry) -> None:
    bounds, quota = list(_cgroup_limits(inquiry.root)), inquiry.quota_nbytes()
    if not bounds:
        area.ok("cgroup memory", "no limit")
        return
    least = min(bounds, key=lambda found: found.limit)
    text = f"{mib(least.limit)} at most, {mib(least.used)} in use, the quota is {mib(quota)}"
    if least.limit < quota:
        cure = f"raise /{least.file} (docker run --memory), or give a smaller quota="
        area.wrong("cgroup memory", text, cure)
    elif least.limit - least.used < quota:
        area.note("cgroup memory", text)
    else:
        area.ok("cgroup memory", text)


def _cgroup_limits(root: Root) -> Iterator[_MemoryLimit]:
    """The limits of this process's cgroup and of those above it, of v2 and of v1."""
    for line in root.text("proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts = ["", "unified"]
            limit, used = "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mounts = ["memory"]
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = PurePosixPath(path)
        for mount in mounts:
            # A container sees its own group at the top, whatever its path.
            for ancestor in (group, *group.parents):
                folder = PurePosixPath("sys/fs/cgroup", mount, str(ancestor).lstrip("/"))
                nbytes = root.text(f"{folder}/{limit}")
                if nbytes.isdigit() and int(nbytes) < _UNLIMITED:
                    usage = root.text(f"{folder}/{used}")
                    current = int(usage) if usage.isdigit() else 0
                    yield _MemoryLimit(f"{folder}/{limit}", int(nbytes), current)


def _available(area: Area, inquiry: Inquiry) -> None:
    amount = inquiry.root.fields("proc/meminfo").get("MemAvailable", "").split()
    quota = inquiry.quota_nbytes()
    if not amount:
        area.note("available", "unknown: /proc/meminfo does not say")
        return
    nbytes = int(amount[0]) * 1024
    text = f"{mib(nbytes)}, the quota is {mib(quota)}"
    if nbytes >= quota:
        area.ok("available", text)
    elif inquiry.quota:
        area.wrong("available", text, "end processes, or give a smaller quota=")
    else:
        area.note("available", text)
