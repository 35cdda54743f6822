"""Two network namespaces, connected by a veth pair that can lose packets or be disconnected."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_numbers = itertools.count()
_CLONE_NEWNET = 0x40000000
_ETH_P_ALL = 3
_RANDOM = 0xFFFFF000 + 56
"""Where classic BPF finds a random word: SKF_AD_OFF + SKF_AD_RANDOM."""


class Cable:
    """The namespaces `left` and `right`, each with an address."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.left, self.right = (f"kvl-{side}-{os.getpid()}-{number}" for side in "lr")
        self.address = {self.left: "10.79.0.1", self.right: "10.79.0.2"}
        try:
            for host in self.address:
                _do("ip", "netns", "add", host)
            there = [
                "netns",
                self.left,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                self.right,
            ]
            _do("ip", "link", "add", "eth0", *there)
            for host, address in self.address.items():
                _do("ip", "-n", host, "address", "add", f"{address}/24", "dev", "eth0")
                _do("ip", "-n", host, "link", "set", "lo", "up")
                # Packets of the MTU's size: otherwise each has 64 KiB, and few are lost.
                _do("ip", "-n", host, "link", "set", "eth0", "gso_max_segs", "1", "up")
        except BaseException:
            self.close()
            raise

    def disconnect(self) -> None:
        """Let nothing pass from now on, without notifying either side."""
        _do("ip", "-n", self.left, "link", "set", "eth0", "down")

    def reconnect(self) -> None:
        _do("ip", "-n", self.left, "link", "set", "eth0", "up")

    @contextmanager
    def losing(self, percent: float) -> Iterator[None]:
        """Drop each packet, in both directions, with this probability."""
        most = int((1 - percent / 100) * (1 << 32)) - 1
        drop = f"4,32 0 0 {_RANDOM},37 0 1 {most},6 0 0 2,6 0 0 0"  # if random > most: TC_ACT_SHOT
        for host in self.address:
            _do("tc", "-n", host, "qdisc", "add", "dev", "eth0", "clsact")
            transport = ["filter", "add", "dev", "eth0", "egress", "bpf", "bytecode", drop]
            _do("tc", "-n", host, *transport, "direct-action")
        try:
            yield
        finally:
            for host in self.address:
                _do("tc", "-n", host, "qdisc", "del", "dev", "eth0", "clsact")

    def dropped(self) -> int:
        """Return the number of packets dropped since `losing` began."""
        found = 0
        for host in self.address:
            shown = _do("tc", "-n", host, "-s", "-j", "qdisc", "show", "dev", "eth0")
            found += sum(it["drops"] for it in json.loads(shown) if it["kind"] == "clsact")
        return found

    def open_tap(self) -> socket.socket:
        """Return a socket that receives every frame of the left namespace."""
        found: list[socket.socket] = []

        def enter() -> None:
            enter_namespace(self.left)
            found.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        [tap] = found
        tap.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE
        tap.bind(("eth0", 0))
        return tap

    def close(self) -> None:
        for host in self.address:  # the veth pair is removed with them
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def enter_namespace(name: str) -> None:
    """Move the calling thread, and all that it starts, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def missing() -> str:
    """Return why there can be no cable on this machine; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool!r} is missing: apt install iproute2"
    try:
        cable = Cable()
    except OSError as error:
        return f"no network namespaces here: {error}"
    try:
        with cable.losing(1):
            return ""
    except OSError as error:
        return f"no clsact and classic BPF here: {error}"
    finally:
        cable.close()


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
