"""`kvlink-bench serve`: readers for producers of other hosts, and the producer's side of one."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import omni_kvlink
from omni_kvlink.bench.remote_address import TOKEN_VARIABLE, RemoteAddress, read_address
from omni_kvlink.bench.report import BenchError
from omni_kvlink.bench.result import Result
from omni_kvlink.cli.process import show
from omni_kvlink.cli.terminal import Progress, progress
from omni_kvlink.testing.peer_harness import Peer, PeerExited, ProcessPeer

if TYPE_CHECKING:
    from omni_kvlink.bench.setups import ServeSetup

TOKEN_TIMEOUT = 10.0
_PINGS = 50


def measure(setup: ServeSetup, progress: Progress = progress) -> Result:
    """Give each connection that begins with the token a reader; they are served in turn."""
    address = read_address(setup.url)
    token = address.token or secrets.token_hex(16)
    served = refused = 0
    with _listen(address) as listener:
        host, port = listener.getsockname()
        url = RemoteAddress(host, port, token).url
        show(
            f"on the other host: kvlink-bench latency --connector zmq+tcp --connect {url}",
            to_stderr=True,
        )
        while not setup.connections or served < setup.connections:
            connection, _ = listener.accept()
            with connection:
                if _has_token(connection, token):
                    _read_for(connection)
                    served += 1
                else:
                    refused += 1
    counts = {"served": served, "refused": refused}
    lines = [(name, f"{count} connections") for name, count in counts.items()]
    return Result(counts, [("address", f"tcp://{host}:{port}")], "", lines)


def open_remote(text: str) -> tuple[Peer, str, str]:
    """Connect to `serve`: its reader, this host's address for it, and how its clock was set.

    BenchError if `serve` is not there, or refuses the token.
    """
    address = read_address(text)
    where = f"tcp://{address.host}:{address.port}"
    program = (sys.executable, str(Path(__file__).with_name("relay.py")))
    env = {**os.environ, TOKEN_VARIABLE: address.token}
    arguments = (address.host, str(address.port))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((address.host, address.port))
            host = probe.getsockname()[0]
        peer = ProcessPeer(env, program=program, arguments=arguments, concurrent=False)
    except (PeerExited, OSError):
        why = "is it running, and is this the token that it has printed?"
        raise BenchError(f"no answer from kvlink-bench serve at {where}: {why}") from None
    return peer, host, set_clock(peer)


def boot() -> str:
    """The host's boot, within which all processes read the same monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def set_clock(peer: Peer) -> str:
    """Have a reader's moments be those of this host; what the error can be, for people."""
    if peer.call("boot") == boot():
        return "the same clock at both ends"
    trips = list[tuple[int, int]]()
    for _ in range(_PINGS):
        sent = time.monotonic_ns()
        moment = peer.call("ping")
        returned = time.monotonic_ns()
        trips.append((returned - sent, (sent + returned) // 2 - moment))
    trip, offset = min(trips)
    peer.call("set_clock", offset=offset)
    return f"the reader's clock by round trips, within {trip / 2e3:.0f} microseconds"


def _listen(address: RemoteAddress) -> socket.socket:
    try:
        return socket.create_server((address.host, address.port))
    except OSError as error:
        raise BenchError(f"tcp://{address.host}:{address.port}: {error.strerror}") from None


def _has_token(connection: socket.socket, token: str) -> bool:
    """Whether the first line is the token; nothing behind it is read."""
    connection.settimeout(TOKEN_TIMEOUT)
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) <= len(token):
            byte = connection.recv(1)
            if not byte:
                return False
            line += byte
    except OSError:
        return False
    connection.settimeout(None)
    return hmac.compare_digest(line, token.encode() + b"\n")


def _read_for(connection: socket.socket) -> None:
    """Run a reader whose commands come through a connection, until that ends."""
    root = str(Path(omni_kvlink.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    subprocess.run(
        [sys.executable, "-m", "omni_kvlink.bench.reader"],
        stdin=connection.fileno(),
        stdout=connection.fileno(),
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
