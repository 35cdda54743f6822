"""Attacks honest pairs of processes over every connector, and prints what it did to them.

    python benchmarks/hostile.py [--minutes 1] [--connector NAME …] [--rate 100] [--json FILE]

Each pair transfers in a loop, first alone, then beside an attacker of another user: uid 65534 where
this is root, else of the same user, which is said. The attacker finds every port and socket of both
processes. It connects, sends random bytes, speaks ZMTP 1, 2 and 3 with forged routing ids, leaves
handshakes unfinished, sends frames that are too long and messages that do not end, and tries to
open the processes' memory. Of a `ucx://` link it finds the control port alone: whoever reaches
UCX's own ports may write into the process, as `trusted_network=True` says. Exit status 1 if a
process ended, a byte was wrong, a transfer failed, memory was opened, the producer grew by more
than 32 MiB, an attempt that reached it is in none of its counters, or the 99th percentile of the
transfers is more than 3 times what it was alone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from omni_kvlink import KVLink, KVLinkError, TensorTransferData, UnavailableError
from omni_kvlink.bench import machine, report
from omni_kvlink.bench.stats import Summary
from omni_kvlink.cli import terminal
from omni_kvlink.connectors.control.keys import generate
from omni_kvlink.connectors.protocol.messages import encode, own_hello
from omni_kvlink.connectors.registry import backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOBODY = 65534
NBYTES = 256 << 10
QUOTA = 64 << 20
GROWTH_MIB, RATIO = 32.0, 3.0
PATIENCE = 60.0
CONNECTORS = ("shm", "shm-sealed", "zmq+ipc", "zmq+tcp", "zmq+tcp-keys", "ucx", "auto")


def content(number: int) -> bytes:
    return random.Random(number).randbytes(NBYTES)


# ---- the honest pair


def produce(url: str, options: dict[str, Any]) -> None:
    """Serve; for each line `SECONDS` on stdin transfer for so long, and print what it took."""
    with KVLink.serve(url, **options) as link:
        emit(url=link.url)
        number = 0
        for line in sys.stdin:
            until, times, failed = time.monotonic() + float(line), list[float](), list[str]()
            while time.monotonic() < until or not times:
                tensor = torch.frombuffer(bytearray(content(number)), dtype=torch.uint8)
                payload = TensorTransferData(f"k{number}", {"bytes": tensor})
                began = time.monotonic()
                try:
                    link.put(payload, timeout=PATIENCE).wait(timeout=PATIENCE)
                except KVLinkError as error:
                    failed.append(repr(error))
                times.append(1e3 * (time.monotonic() - began))
                number += 1
            emit(times=Summary.of(times).to_dict(), count=len(times), failed=failed[:5])
            counters = counters_of(link.stats())
            emit(refused=counters)
        link.put(TensorTransferData(f"k{number}", {}, {"last": True})).wait(timeout=PATIENCE)


def counters_of(stats: dict[str, Any]) -> dict[str, int]:
    """The attempts that a producer counted, of all its listeners."""
    found: Counter[str] = Counter()
    for listener in (stats, *stats.get("listeners", ())):
        found.update(listener.get("refused", {}))
    return dict(found)


def consume(url: str, options: dict[str, Any]) -> None:
    """Get every payload and compare its bytes by SHA-256; print how many were right."""
    right, wrong, failed, number = 0, 0, list[str](), 0
    with KVLink.connect(url, timeout=PATIENCE, **options) as link:
        emit(connected=True)
        while True:
            try:
                with link.get(f"k{number}", timeout=2 * PATIENCE) as data:
                    assert isinstance(data, TensorTransferData)
                    if data.metadata.get("last"):
                        break
                    found = hashlib.sha256(data["bytes"].numpy().tobytes()).digest()
                if found == hashlib.sha256(content(number)).digest():
                    right += 1
                else:
                    wrong += 1
            except KVLinkError as error:
                failed.append(repr(error))
                break
            number += 1
    emit(right=right, wrong=wrong, failed=failed)


def emit(**values: Any) -> None:
    print(json.dumps(values), flush=True)


# ---- the attacker


class Target:
    """The ports, sockets and processes of a pair, and what an attacker did to them.

    `reached` are attempts by which bytes or a connection came to a socket, and which its owner must
    have counted; `denied` those that the system refused; `breached` those that opened memory.
    """

    def __init__(self, ports: list[int], paths: list[str], pids: list[int]):
        self.ports, self.paths, self.pids = ports, paths, pids
        self.reached, self.denied, self.breached = Counter[str](), Counter[str](), Counter[str]()
        self._open: list[socket.socket] = []

    def connections(self, name: str, *sent: bytes, keep: bool = False) -> None:
        """Connect to each socket, and send these bytes."""
        addresses: list[tuple[int, Any]] = [(socket.AF_INET, ("127.0.0.1", p)) for p in self.ports]
        addresses += [(socket.AF_UNIX, path) for path in self.paths]
        for family, address in addresses:
            for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
                if family == socket.AF_INET and kind != socket.SOCK_STREAM:
                    continue
                sock = socket.socket(family, kind)
                sock.settimeout(1.0)
                try:
                    sock.connect(address)
                except OSError as error:
                    if error.errno != 91:  # EPROTOTYPE: a socket of the other kind
                        self.denied[name] += 1
                    sock.close()
                    continue
                self.reached[name] += 1
                with contextlib.suppress(OSError):  # refused meanwhile
                    for part in sent:
                        sock.sendall(part)
                    if sent and not keep:
                        sock.recv(1 << 16)
                if keep and len(self._open) < 64:
                    self._open.append(sock)
                else:
                    sock.close()

    def attempt(self, name: str, call: Callable[[], object]) -> None:
        """Try to open memory or to control a process."""
        try:
            call()
        except OSError:
            self.denied[name] += 1
        else:
            self.breached[name] += 1

    def close(self) -> None:
        for sock in self._open:
            sock.close()


def greeting(mechanism: bytes) -> bytes:
    """The greeting of ZMTP 3.0."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def ready(identity: bytes) -> bytes:
    """The READY command of a DEALER with this routing id."""
    properties = b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    )
    body = b"\x05READY" + properties
    return b"\x04" + bytes([len(body)]) + body


def frame(body: bytes, *, more: bool = False) -> bytes:
    """A frame of ZMTP 2.0 and 3.0."""
    if len(body) < 256:
        return bytes([more, len(body)]) + body
    return bytes([2 | more]) + struct.pack(">Q", len(body)) + body


def attack(target: Target, turn: int) -> None:
    """Do every attempt once."""
    rng = random.Random(turn)
    hello = encode(own_hello())
    null, forged = greeting(b"NULL"), b"\0" + struct.pack(">I", turn % 64)
    target.connections("connect")
    target.connections("random bytes", rng.randbytes(rng.choice((1, 64, 5000, 100_000))))
    target.connections("ZMTP 1", b"\x01\x00", bytes([len(hello) + 1, 0]) + hello)
    signature = b"\xff" + bytes(8) + b"\x7f"
    target.connections("ZMTP 2", signature + b"\x01\x05", frame(b""), frame(hello))
    target.connections("ZMTP 3", null + ready(forged), frame(hello))
    target.connections("ZMTP 3 garbage", null + ready(b""), frame(rng.randbytes(200)))
    target.connections("CURVE garbage", greeting(b"CURVE"), b"\x04\xc8" + rng.randbytes(200))
    target.connections("half a handshake", null[: rng.randrange(1, 64)], keep=True)
    target.connections("huge frame", null + ready(b"") + b"\x02" + struct.pack(">Q", 1 << 40))
    endless = [frame(bytes(60_000), more=True)] * 20
    target.connections("endless message", null + ready(b""), *endless)
    target.connections("a bare Hello", hello)
    for pid in target.pids:
        steal(target, pid)


def steal(target: Target, pid: int) -> None:
    """Try to open the memory and the descriptors of a process, and to trace it."""

    def trace() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(16, pid, None, None):  # PTRACE_ATTACH
            raise OSError(ctypes.get_errno(), "ptrace")

    target.attempt("ptrace", trace)
    target.attempt("/proc/PID/mem", lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)))
    target.attempt("/proc/PID/fd", lambda: os.listdir(f"/proc/{pid}/fd"))
    target.attempt("/proc/PID/map_files", lambda: os.listdir(f"/proc/{pid}/map_files"))
    for path in target.paths:
        lock(target, os.path.dirname(path))
    owner = os.stat(f"/proc/{pid}").st_uid
    for name in os.listdir("/dev/shm"):
        path = f"/dev/shm/{name}"
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_uid == owner and is_mapped(pid, path):
                target.attempt("/dev/shm", lambda it=path: os.close(os.open(it, os.O_RDONLY)))  # type: ignore[misc]


def lock(target: Target, directory: str) -> None:
    """Lock a directory of sockets for a moment; a breach if the system lets another user."""

    def call() -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)

    target.attempt("flock", call)


def is_mapped(pid: int, path: str) -> bool:
    """Whether a process maps this file; of another user's process this is not told."""
    try:
        return path in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return True


def run_attacker(targets: dict[str, Any], seconds: float, rate: float) -> None:
    """Attack until the time is over, and print what was reached."""
    uid = os.geteuid()
    if uid == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    target = Target(targets["ports"], targets["paths"], targets["pids"] if uid == 0 else [])
    until, turn = time.monotonic() + seconds, 0
    while time.monotonic() < until or not turn:
        began, before = time.monotonic(), target.reached.total() + target.denied.total()
        attack(target, turn)
        turn += 1
        made = target.reached.total() + target.denied.total() - before
        time.sleep(max(0.0, made / rate - (time.monotonic() - began)))
    target.close()
    emit(uid=os.geteuid(), reached=target.reached, denied=target.denied, breached=target.breached)


# ---- one connector after another


class Process:
    """A fork of this process in a role; it hears lines and prints lines."""

    _fds: ClassVar[set[int]] = set()  # of this process, which a fork would keep open

    def __init__(self, role: Callable[..., None], *arguments: Any):
        (hears, to), (of, tells) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            for fd in (to, of, *Process._fds):
                os.close(fd)
            sys.stdin, sys.stdout = os.fdopen(hears), os.fdopen(tells, "w")
            status = 1
            try:
                role(*arguments)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(hears)
        os.close(tells)
        self._to, self._of = os.fdopen(to, "w"), os.fdopen(of)
        Process._fds |= {to, of}

    def receive(self) -> dict[str, Any]:
        """The next line that it prints; BenchError if it ended."""
        line = self._of.readline()
        if not line:
            _, status = os.waitpid(self.pid, 0)
            self.pid = 0
            raise report.BenchError(f"a process ended with {os.waitstatus_to_exitcode(status)}")
        return dict(json.loads(line))

    def send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # `receive` says how it ended
            self._to.write(f"{line}\n")
            self._to.flush()

    def end(self) -> None:
        """Tell it that there are no more lines."""
        Process._fds.discard(self._to.fileno())
        with contextlib.suppress(BrokenPipeError):
            self._to.close()

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        for file in (self._to, self._of):
            if not file.closed:
                Process._fds.discard(file.fileno())
                with contextlib.suppress(BrokenPipeError):
                    file.close()


def settings(name: str, folder: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """URL, and the options of the producer and of the reader."""
    unique = f"hostile-{os.getpid()}"
    own: dict[str, Any] = {"quota": QUOTA}
    if name.startswith("shm"):
        own |= {"directory": folder} | ({"mode": "sealed"} if name == "shm-sealed" else {})
        return f"shm://{unique}", own, own
    if name == "zmq+ipc":
        return f"zmq+ipc://{folder}/control", own, own
    if name == "auto":
        return (
            f"auto://{unique}?tcp=127.0.0.1:0",
            own | {"directory": folder},
            own | {"directory": folder},
        )
    if name == "zmq+tcp-keys":
        allowed = os.path.join(folder, "allowed")
        for key in ("producer", "reader"):
            generate(folder, key)
        os.mkdir(allowed, 0o700)
        shutil.copy(f"{folder}/reader.public", allowed)
        server = own | {"keys": f"{folder}/producer.secret", "peers": allowed}
        client = own | {"keys": f"{folder}/reader.secret", "peers": f"{folder}/producer.public"}
        return "zmq+tcp://127.0.0.1:0", server, client
    if name == "ucx":
        own["trusted_network"] = True
    return f"{name}://127.0.0.1:0", own, own


def sockets_of(pids: list[int]) -> tuple[list[int], list[str]]:
    """The ports and the paths where these processes listen."""
    inodes = set[str]()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                inodes.update(
                    re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                )
    ports, paths = list[int](), list[str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == "0A":
                ports.append(int(fields[1].rpartition(":")[2], 16))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and fields[3] == "00010000" and len(fields) > 7:
            paths.append(re.sub(r"\.\d+$", "", fields[7]))  # shm's socket is renamed after `bind`
    return ports, paths


def memory_of(pid: int, field: str) -> float:
    """MiB of a process, by a field of its status."""
    text = Path(f"/proc/{pid}/status").read_text()
    (found,) = re.findall(rf"{field}:\s+(\d+) kB", text)
    return int(found) / 1024


@contextlib.contextmanager
def pair(name: str) -> Iterator[tuple[Process, Process, str]]:
    """A producer, a reader that is connected, and their URL."""
    processes = list[Process]()
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
        url, server, client = settings(name, folder)
        try:
            processes.append(Process(produce, url, server))
            bound = processes[0].receive()["url"]
            processes.append(Process(consume, bound, client))
            processes[1].receive()
            yield processes[0], processes[1], bound
        finally:
            for process in processes:
                process.kill()


def measure(name: str, seconds: float, rate: float) -> dict[str, Any]:
    """Run a pair alone, then beside the attacker; return one result."""
    result: dict[str, Any] = {"connector": name, "problems": []}
    problems: list[str] = result["problems"]
    with pair(name) as (producer, reader, url):
        producer.send(str(max(0.2, seconds / 4)))  # warm
        producer.receive(), producer.receive()
        producer.send(str(seconds / 2))
        alone = producer.receive()
        before = producer.receive()["refused"]
        ports, paths = sockets_of([producer.pid, reader.pid])
        if name == "ucx":
            ports = [int(url.rpartition(":")[2])]
        Path(f"/proc/{producer.pid}/clear_refs").write_text("5")  # the peak counts from here on
        resident = memory_of(producer.pid, "VmRSS")
        targets = {"ports": ports, "paths": paths, "pids": [producer.pid, reader.pid]}
        attacker = Process(run_attacker, targets, seconds, rate)
        try:
            producer.send(str(seconds))
            beside, _ = producer.receive(), producer.receive()
            if beside["failed"]:
                raise report.BenchError(f"a transfer failed: {beside['failed'][0]:.200}")
            made = attacker.receive()
            counted = settled(producer, before, sum(made["reached"].values()))
            growth = memory_of(producer.pid, "VmHWM") - resident
            producer.end()
            got = reader.receive()
        except report.BenchError as error:
            problems.append(str(error))
            return result
        finally:
            attacker.kill()
    ratio = beside["times"]["p99"] / alone["times"]["p99"]
    result |= {"uid": made["uid"], "alone": alone, "beside": beside, "ratio": ratio}
    result |= {"made": made, "counted": counted, "growth_mib": growth, "read": got}
    result |= {"ports": len(ports), "paths": len(paths)}
    if got["wrong"]:
        problems.append(f"{got['wrong']} payloads with wrong bytes")
    if failed := [*alone["failed"], *got["failed"]]:
        problems.append(f"transfers failed: {failed[0]:.200}")
    if growth > GROWTH_MIB:
        problems.append(f"the producer grew by {growth:.0f} MiB")
    if made["breached"] and made["uid"] == NOBODY:
        problems.append(f"opened: {made['breached']}")
    reached = sum(made["reached"].values())
    if reached > sum(counted.values()) and made["uid"] == NOBODY:
        problems.append(f"{reached} attempts reached it, {sum(counted.values())} were counted")
    return result


def settled(producer: Process, before: dict[str, int], reached: int) -> dict[str, int]:
    """The counters since `before`, once all is counted, or after a while."""
    deadline = time.monotonic() + 10
    while True:
        producer.send("0.1")
        producer.receive()
        now = producer.receive()["refused"]
        counted = {key: value - before.get(key, 0) for key, value in now.items()}
        if sum(counted.values()) >= reached or time.monotonic() > deadline:
            return counted


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="for all connectors together")
    parser.add_argument("--connector", action="append", choices=CONNECTORS)
    parser.add_argument("--rate", type=float, default=100.0, help="attempts a second")
    parser.add_argument("--no-times", action="store_true", help="do not judge the times")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    about = machine.describe()
    print(machine.one_line(about))
    names, results = args.connector or CONNECTORS, list[dict[str, Any]]()
    for name in names:
        try:
            backend(name.partition("-")[0])
            result = measure(name, 60 * args.minutes / len(names) / 2, args.rate)
        except UnavailableError as error:
            print(f"{name}: not run: {error}")
            continue
        if "ratio" in result and result["ratio"] > RATIO and not args.no_times:
            result["problems"].append(f"p99 is {result['ratio']:.1f} times what it was alone")
        results.append(result)
    print(terminal.table(HEAD, [cells(result) for result in results]))
    for result in results:
        for problem in result["problems"]:
            print(f"{result['connector']}: {problem}")
    if args.json:
        report.write_json(args.json, "hostile", about, vars(args), {"rows": results})
    return 1 if not results or any(result["problems"] for result in results) else 0


HEAD = ["transfers", "p99 alone", "beside", "ratio", "reached", "counted", "denied", "MiB"]
HEAD = [*HEAD, "connector", "attacker"]


def cells(result: dict[str, Any]) -> list[str]:
    """The line of one connector."""
    if "ratio" not in result:
        return [*["0"] * 8, result["connector"], "ended"]
    made = result["made"]
    return [
        str(result["read"]["right"]),
        f"{result['alone']['times']['p99']:.2f}",
        f"{result['beside']['times']['p99']:.2f}",
        f"{result['ratio']:.2f}",
        str(sum(made["reached"].values())),
        str(sum(result["counted"].values())),
        str(sum(made["denied"].values())),
        f"{result['growth_mib']:.1f}",
        result["connector"],
        f"uid {made['uid']}",
    ]


if __name__ == "__main__":
    sys.exit(main())
