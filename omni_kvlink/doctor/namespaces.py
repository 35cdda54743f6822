"""Examines the namespaces of the process: who its user is outside, and which processes it sees."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_kvlink.doctor.findings import Area
    from omni_kvlink.doctor.inquiry import Inquiry
    from omni_kvlink.doctor.root import Root

_ALL = 4294967295
"""Users that the map of the first namespace counts."""


def examine(area: Area, inquiry: Inquiry) -> None:
    """Add the findings."""
    _users(area, inquiry.root)
    _processes(area, inquiry.root)
    area.ok("network", f"{inquiry.root.link('proc/self/ns/net') or 'unknown'}, of its own loopback")


def _users(area: Area, root: Root) -> None:
    uid, text = os.geteuid(), root.text("proc/self/uid_map")
    ranges = [tuple(map(int, line.split())) for line in text.splitlines()]
    if not root.has("proc/self/uid_map") or ranges == [(0, 0, _ALL)]:
        area.ok("users", f"uid {uid}, of the machine's own users")
        return
    outside = [
        start + uid - first for first, start, count in ranges if first <= uid < first + count
    ]
    if outside:
        text = f"uid {uid} here is {outside[0]} outside: shm:// takes peers of that uid alone"
        area.note("users", text)
    else:
        cure = "give it one (unshare --map-root-user, docker --userns=host), the same on both sides"
        area.wrong("users", f"uid {uid} has no user outside this user namespace (uid_map)", cure)


def _processes(area: Area, root: Root) -> None:
    numbers = root.fields("proc/self/status").get("NSpid", "").split()
    name = root.link("proc/self/ns/pid") or "pid namespace unknown"
    if len(numbers) > 1:
        text = f"{name}, within another one: a peer outside is seen as pid 0 (--pid=host)"
        area.note("processes", text)
    else:
        area.ok("processes", name)
