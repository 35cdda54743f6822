"""Makes each system call of the public API fail, one a process, and reports what comes of it.

    LD_PRELOAD=errno_shim.so python errno_cases.py DIRECTORY SCHEME:LIMIT[:FUNCTION] …

`SCHEME` is "shm", "ipc", "tcp" or "files". The calls are counted first; then each is made to fail
with each errno that it plausibly has, in a fork of this process; `LIMIT` of these cases, chosen by
chance, or all with 0. Each line of output is JSON: a case with which something was wrong, or, last
for each argument, the number of cases.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import functools
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import KVCacheTransferData, KVLink, KVLinkError, TensorTransferData
from omni_kvlink.connectors.control.keys import generate
from omni_kvlink.connectors.control.lane import lanes_refusal
from omni_kvlink.connectors.registry import backend
from support.connectors.zmq_addresses import start_garbage_collection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

E = errno
NO_FILES, NO_MEMORY = (E.EMFILE, E.ENFILE), (E.ENOMEM,)
PATH = (E.EACCES, E.EROFS, E.ENOENT, E.EIO)
FUNCTIONS: dict[int, tuple[str, tuple[int, ...]]] = {
    0: ("open", (*NO_FILES, *PATH, E.ENOSPC)),
    1: ("memfd_create", (*NO_FILES, E.ENOMEM, E.ENOSYS)),
    2: ("ftruncate", (E.EFBIG, E.ENOSPC)),
    3: ("posix_fallocate", (E.ENOSPC, E.EINTR, E.EFBIG)),
    4: ("mmap", (E.ENOMEM, E.EAGAIN, E.EPERM)),
    5: ("socket", (*NO_FILES, E.ENOBUFS, E.EAFNOSUPPORT)),
    6: ("bind", (E.EADDRINUSE, E.EACCES, E.EROFS, E.ENOSPC)),
    7: ("listen", (E.EADDRINUSE, E.EOPNOTSUPP)),
    8: ("connect", (E.ECONNREFUSED, E.EACCES, E.EAGAIN, E.ETIMEDOUT)),
    9: ("accept4", (*NO_FILES, E.ECONNABORTED, E.ENOBUFS, E.EPERM)),
    10: ("sendmsg", (E.ENOBUFS, E.EPIPE, E.ECONNRESET, E.ETOOMANYREFS)),
    11: ("recvmsg", (E.ECONNRESET, E.ENOMEM, E.EMFILE)),
    12: ("send", (E.ENOBUFS, E.EPIPE, E.ECONNRESET)),
    13: ("recv", (E.ECONNRESET, E.ENOMEM)),
    14: ("setsockopt", (E.ENOBUFS, E.EPERM, E.ENOPROTOOPT)),
    15: ("getsockopt", (E.ENOBUFS, E.ENOPROTOOPT)),
    16: ("epoll_create1", (*NO_FILES, E.ENOMEM)),
    17: ("epoll_ctl", (E.ENOSPC, E.ENOMEM)),
    18: ("eventfd", (*NO_FILES, E.ENOMEM)),
    19: ("unlink", (E.EACCES, E.EROFS)),
    20: ("mkdir", (E.EACCES, E.EROFS, E.ENOSPC)),
    21: ("chmod", (E.EPERM, E.EROFS)),
    22: ("stat", (E.EACCES, E.EIO)),
    23: ("fstat", (E.EIO, E.ENOMEM)),
    24: ("fcntl", (E.EPERM, E.EBUSY)),
    25: ("flock", (E.ENOLCK, E.EINTR)),
    26: ("rename", (E.EACCES, E.ENOSPC)),
    27: ("fsync", (E.EIO, E.ENOSPC)),
    28: ("write", (E.ENOSPC, E.EIO, E.EDQUOT)),
    29: ("read", (E.EIO,)),
    30: ("pthread_create", (E.EAGAIN,)),
    31: ("getsockname", (E.ENOBUFS,)),
    32: ("zmq_ctx_new", NO_FILES),
    33: ("zmq_socket", NO_FILES),
    34: ("zmq_bind", (E.EADDRINUSE, E.EACCES, E.EADDRNOTAVAIL, E.EROFS, E.ENODEV)),
    35: ("zmq_connect", (E.EINVAL, E.ENOMEM, E.EMFILE)),
    36: ("zmq_setsockopt", (E.EINVAL, E.ENOMEM)),
    38: ("zmq_msg_send", (E.EHOSTUNREACH,)),
    40: ("zmq_socket_monitor", (E.EMFILE,)),
    41: ("link", (E.EPERM, E.ENOSPC)),
    42: ("rmdir", (E.EACCES,)),
    43: ("access", (E.EACCES,)),
}
PATIENCE = 200.0
"""Seconds after which a process counts as hanging."""
SHORT = 10.0
"""Seconds that a verb waits for what an error may have lost."""


class Shim(ctypes.Structure):
    """The `struct shim` of `errno_shim.c`."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("armed", "function", "number", "error", "failed")),
        ("counts", ctypes.c_long * 64),
    )


keys = (f"k{os.getpid()}-{number}" for number in range(1_000_000))
shim = Shim.in_dll(ctypes.CDLL(None), "kvl_shim")


class Session:
    """Verbs of the public API, each with a key of its own and judged by what arrives."""

    def __init__(self, scheme: str, directory: str):
        self.scheme, self.directory = scheme, directory
        self.keys = keys
        self.producer: Any = None
        self.consumer: Any = None

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The verbs, in their order."""
        if self.scheme == "files":
            yield from [("save", self.save), ("generate", self.generate)]
            return
        yield from [("serve", self.serve), ("connect", self.connect)]
        for name in ("put", "put_large", "put_many", "stream", "append", "allocate", "background"):
            yield name, getattr(self, name)
        yield from [("close consumer", self.close_consumer), ("close producer", self.close)]

    def serve(self) -> None:
        name = f"s{next(self.keys)}"
        options: dict[str, Any] = {"quota": 16 << 20}
        if self.scheme == "shm":
            url, options["directory"] = "shm://errno", f"{self.directory}/own"
        elif self.scheme == "ipc":
            url = f"zmq+ipc://{self.directory}/own/{name}.sock"
        else:
            url = "zmq+tcp://127.0.0.1:0"
        self.producer = KVLink.serve(url, **options)

    def connect(self) -> None:
        options: Any = {"directory": f"{self.directory}/own"} if self.scheme == "shm" else {}
        url = self.producer.url
        self.consumer = KVLink.connect(url, timeout=SHORT, quota=16 << 20, **options)

    def put(self) -> None:
        self._transfer(16)

    def put_large(self) -> None:
        self._transfer(1 << 18)

    def put_many(self) -> None:
        keys = [next(self.keys), next(self.keys)]
        self.producer.put_many([payload(key, 1 << 18) for key in keys], timeout=SHORT)
        with self.consumer.get_many(keys, timeout=SHORT, verify="full") as received:
            for data in received:
                check(data)

    def stream(self) -> None:
        key = next(self.keys)
        with self.producer.stream_put(cache(key), timeout=SHORT) as out:
            for layer in range(2):
                out.write_layer(layer, torch.ones(8, 2, 64), torch.ones(8, 2, 64))
        with self.consumer.stream_get(key, timeout=SHORT) as layers:
            for layer in layers:
                assert bool((layer.key == 1).all())

    def append(self) -> None:
        key, chunk = next(self.keys), {"x": torch.ones(1 << 18)}
        with self.producer.open_stream(key, chunk, timeout=SHORT) as out:
            out.append(chunk, timeout=SHORT)
            out.append(chunk, timeout=SHORT)
        with self.consumer.read_stream(key, timeout=SHORT) as chunks:
            for received in chunks:
                check(received.data)

    def allocate(self) -> None:
        key = next(self.keys)
        allocation = self.producer.allocate(payload(key, 1 << 18), timeout=SHORT)
        allocation.data["x"][:] = 1
        self.producer.put(allocation.data, timeout=SHORT)
        with self.consumer.get(key, timeout=SHORT, verify="full") as data:
            check(data)

    def background(self) -> None:
        key = next(self.keys)
        allocation = self.producer.allocate(payload(key, 1 << 18), timeout=SHORT)
        allocation.data["x"][:] = 1
        receipt = self.producer.put(allocation.data, background=True, timeout=SHORT)
        with self.consumer.get(key, timeout=SHORT, verify="full") as data:
            check(data)
        receipt.wait(timeout=SHORT)

    def save(self) -> None:
        path = f"{self.directory}/{next(self.keys)}.kv"
        cache("saved").save(path)
        for mmap in (False, True):
            read: Any = KVCacheTransferData.load(path, mmap=mmap)
            assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in read.tensors())

    def generate(self) -> None:
        generate(f"{self.directory}/{next(self.keys)}", "k")

    def close_consumer(self) -> None:
        self.consumer.close()

    def close(self) -> None:
        self.producer.close()

    def drop(self) -> None:
        """Close what is open, without an error of the case."""
        for end in (self.consumer, self.producer):
            if end is not None:
                end.close()
        self.consumer = self.producer = None

    def _transfer(self, size: int) -> None:
        key = next(self.keys)
        self.producer.put(payload(key, size), timeout=SHORT)
        with self.consumer.get(key, timeout=SHORT, verify="full") as data:
            check(data)


def payload(key: str, size: int) -> TensorTransferData:
    return TensorTransferData(key, {"x": torch.ones(size)})


def cache(key: str) -> KVCacheTransferData:
    blocks = {name: [torch.ones(8, 2, 64)] * 2 for name in ("key_cache", "value_cache")}
    about = {"kv_lens": [8], "ropes": [8], "num_layers": 2, "layout": "NHD"}
    return KVCacheTransferData(key, blocks, (), about)


def check(data: Any) -> None:
    assert bool((data["x"] == 1).all()), "other bytes"


def run_all(session: Session, *, may_fail: bool) -> list[str]:
    """Run every verb; a failed one once more. Returns what is wrong."""
    wrong = []
    for name, verb in session.steps():
        for attempt in ("", ", again"):
            try:
                verb()
                break
            except KVLinkError as error:
                if not may_fail:
                    wrong.append(f"{name}: {error!r}")
                if ";" not in str(error) and ":" not in str(error):
                    wrong.append(f"{name}: no cure: {error!r}")
                if session.producer is None or (name == "connect" and attempt):
                    return [*wrong, f"{name} failed twice: {error!r}"] if attempt else wrong
            except BaseException:
                wrong.append(f"{name}{attempt}: {traceback.format_exc()}")
    return wrong


def descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def leaks(before: dict[str, str], threads: set[threading.Thread]) -> list[str]:
    """What a session left: descriptors, threads, mapped memory; waits while they end."""
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        new = [
            f"{number}: {what}" for number, what in descriptors().items() if number not in before
        ]
        new += [repr(thread) for thread in threading.enumerate() if thread not in threads]
        with open("/proc/self/maps") as lines:
            new += [line.strip() for line in lines if "memfd:kvlink" in line]
        if not new or time.monotonic() > deadline:
            return [f"left: {what}" for what in new]
        time.sleep(0.01)


def run_case(scheme: str, directory: str, case: tuple[int, int, int] | None) -> dict[str, Any]:
    """In a fork: a session in which a call fails, then one in which none does."""
    noise: list[str] = []
    threading.excepthook = lambda args: noise.append(
        "thread: " + "".join(traceback.format_exception(args.exc_value))
    )
    sys.unraisablehook = lambda args: noise.append(
        "unraisable: " + "".join(traceback.format_exception(args.exc_value))
    )
    warnings.simplefilter("ignore")
    if scheme in ("ipc", "tcp"):
        start_garbage_collection()  # a thread of pyzmq, which stays until the process ends
    before, threads = descriptors(), set(threading.enumerate())
    session = Session(scheme, directory)
    if case is not None:
        shim.function, shim.number, shim.error = case
    else:
        shim.function = -1
    shim.armed = 1
    wrong = run_all(session, may_fail=case is not None)
    shim.armed = 0
    failed = bool(shim.failed)
    session.drop()
    del session
    if case is None:
        return {"wrong": wrong, "counts": list(shim.counts), "noise": noise}
    fresh, name = Session(scheme, directory), ""
    try:
        for name, verb in fresh.steps():  # noqa: B007 (the one that failed)
            verb()
    except BaseException:
        wrong.append(f"afterwards, {name}: {traceback.format_exc()}")
    fresh.drop()
    del fresh, verb
    return {"failed": failed, "wrong": wrong + leaks(before, threads) + noise}


def fork(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call it in a fork of this process; what it returns, or how it ended."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=into)
        try:
            text = json.dumps(function())
        except BaseException:
            text = json.dumps({"wrong": [f"the test itself: {traceback.format_exc()}"]})
        os.write(into, text.encode()[:60_000])
        os._exit(0)
    os.close(into)
    with open(out, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        found = {"wrong": [f"hangs or dies (status {status}): {text[-3000:]}"]}
    return found


def run_cases(directory: str, scheme: str, limit: str, only: str = "") -> None:
    """Count, choose, run; see above."""
    os.makedirs(f"{directory}/own", mode=0o700, exist_ok=True)
    if scheme != "files":  # what a first link imports is no call of the library
        backend({"shm": "shm"}.get(scheme, f"zmq+{scheme}"))
        lanes_refusal(1, is_encrypted=True)
    run = functools.partial(run_case, scheme, directory)
    counted = fork(functools.partial(run, None))
    if counted["wrong"]:
        print(json.dumps({"case": f"{scheme}, none", **counted}))
        return
    cases = [
        (function, number, error)
        for function, (name, errors) in FUNCTIONS.items()
        for number in range(counted["counts"][function])
        for error in errors
        if only in ("", name)
    ]
    if int(limit):
        cases = random.Random(0).sample(cases, min(len(cases), int(limit)))
    done = 0
    for case in cases:
        result = fork(functools.partial(run, case))
        done += bool(result.get("failed", True))
        name = f"{scheme}, {FUNCTIONS[case[0]][0]} {case[1]}: {errno.errorcode[case[2]]}"
        if result["wrong"]:
            print(json.dumps({"case": name, "wrong": result["wrong"]}), flush=True)
    counts = {
        FUNCTIONS[at][0]: n for at, n in enumerate(counted["counts"]) if n and at in FUNCTIONS
    }
    total = {"scheme": scheme, "cases": done, "of": len(cases), "calls": counts}
    print(json.dumps(total), flush=True)


if __name__ == "__main__":
    gc.freeze()  # each fork collects garbage
    for plan in sys.argv[2:]:
        run_cases(sys.argv[1], *plan.split(":"))
