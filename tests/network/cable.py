"""Two network namespaces with nothing between them but a cable, which can fail in many ways."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_numbers = itertools.count()
_CLONE_NEWNET = 0x40000000
_ETH_P_ALL = 3
_RANDOM = 0xFFFFF000 + 56
"""Where classic BPF finds a random word: SKF_AD_OFF + SKF_AD_RANDOM."""


class Cable:
    """Hosts `left` and `right` as namespaces, each with an address of its own."""

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
                # Packets as small as on a wire: else a loss takes 64 KiB, and there are few.
                _do("ip", "-n", host, "link", "set", "eth0", "gso_max_segs", "1", "up")
        except BaseException:
            self.cut_up()
            raise

    def inside(self, host: str) -> list[str]:
        """What to write before a command so that it runs there."""
        return ["ip", "netns", "exec", host]

    def pull(self) -> None:
        """Nothing passes from now on, and nobody is told."""
        _do("ip", "-n", self.left, "link", "set", "eth0", "down")

    def plug(self) -> None:
        _do("ip", "-n", self.left, "link", "set", "eth0", "up")

    @contextmanager
    def losing(self, percent: float) -> Iterator[None]:
        """Each packet, either way, is dropped with this chance."""
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

    def lost(self) -> int:
        """Packets dropped since it began to lose them."""
        found = 0
        for host in self.address:
            shown = _do("tc", "-n", host, "-s", "-j", "qdisc", "show", "dev", "eth0")
            found += sum(it["drops"] for it in json.loads(shown) if it["kind"] == "clsact")
        return found

    def tap(self) -> socket.socket:
        """Hears every frame that enters or leaves the left host."""
        found: list[socket.socket] = []

        def enter() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{self.left}") as there:
                if libc.setns(there.fileno(), _CLONE_NEWNET):  # of this thread alone
                    raise OSError(ctypes.get_errno(), "setns")
            found.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        [tap] = found
        tap.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE
        tap.bind(("eth0", 0))
        return tap

    def cut_up(self) -> None:
        for host in self.address:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def missing() -> str:
    """Why there can be no cable here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool!r}: apt install iproute2"
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
        cable.cut_up()


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
