"""Python programs of tests start as forks of one process; `KVLINK_TESTS_FORK=0` switches it off.

Importing torch takes about two seconds of a core, the engine most of another one, and the tests
start hundreds of processes; the server has imported both. A `ForkingPopen` is a `subprocess.Popen`
in all else: the program is a child of the process that started it, with the arguments, environment,
directory and descriptors that were given. What only a new interpreter can do (other options of
Python, another host's namespace, settings that torch reads when it is loaded) starts one.

Programs that such a program starts are new interpreters, unless its environment has `NESTED`.

The servers are this module, run as a program. One has imported omni_kvlink; the other one has not:
it is for programs with settings that the package reads when it is imported, with another copy of
the package, and for `without_package`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import inspect
import json
import multiprocessing.util
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

PRELOADED = ("torch", "torch.distributed", "numpy", "msgspec", "yaml", "zmq")
PACKAGE = (
    "omni_kvlink.engine",
    "omni_kvlink.models.bagel",
    "omni_kvlink.testing.peer_harness",
)
_NAME = "omni_kvlink"
_SETTINGS = "OMNI_KVLINK_"
_READ_AT_IMPORT = ("CUDA_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_")
"""Environment variables of which a change needs a new interpreter (but for PYTHONPATH)."""
SWITCH = "KVLINK_TESTS_FORK"
"""Environment variable: with "0", `install` does nothing."""
NESTED = "KVLINK_TESTS_FORK_NESTED"
"""Environment variable: the program has a fork server of its own, its first child."""
_CLONE = {"x86_64": 56, "aarch64": 220}
"""Numbers of the system call `clone`."""
_CLONE_PARENT = 0x8000
_MAX_NBYTES = 1 << 20


class Program(NamedTuple):
    """What a fork shall run."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    descriptors: list[int]
    """Numbers that the descriptors sent with the program shall have."""
    new_session: bool


class ForkServer:
    """A server's process, started with the first program."""

    def __init__(self, *modules: str) -> None:
        self.modules = modules
        self._lock = threading.Lock()
        self._owner = 0
        self._settings: dict[str, str] = {}

    def can_run(self, arguments: list[str], environment: dict[str, str]) -> bool:
        """Whether a fork is as good as a new interpreter."""
        if platform.machine() not in _CLONE or len(arguments) < 2 or arguments[0] != sys.executable:
            return False
        if arguments[1].startswith("-") and arguments[1] not in ("-c", "-m"):
            return False
        return _fixed(environment) == _fixed(os.environ)

    def is_set_as(self, environment: dict[str, str]) -> bool:
        """Whether the package reads the same settings in this environment."""
        return self._settings == _settings(environment)

    def start(self, program: Program, sources: list[int]) -> int:
        """Fork; return the number of the new process, a child of this one."""
        with self._lock:
            if self._owner != os.getpid():  # a fork of this process has no server yet
                self.begin()
            message = json.dumps(program).encode()
            socket.send_fds(self._socket, [message], sources)
            return int(self._socket.recv(64))

    def close(self) -> None:
        """End the server; `start` begins another."""
        with self._lock:
            if self._owner == os.getpid():
                self._owner = 0
                self._socket.close()
                self._process.wait()

    def use(self, connection: socket.socket) -> None:
        """Use a server that is a fork of this process; it ends with this process."""
        self._socket, self._owner = connection, os.getpid()
        self._settings = _settings(os.environ)

    def begin(self) -> None:
        """Start the server; it is ready later."""
        self._settings = _settings(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_NBYTES)
        with theirs:
            self._process = _Popen(
                [sys.executable, __file__, str(theirs.fileno()), *self.modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would not be forked
            )
        self._owner = os.getpid()


def _fixed(environment: Any) -> dict[str, str]:
    names = (name for name in environment if name.startswith(_READ_AT_IMPORT))
    return {name: environment[name] for name in names if name != "PYTHONPATH"}


def _settings(environment: Any) -> dict[str, str]:
    return {name: environment[name] for name in environment if name.startswith(_SETTINGS)}


def _is_same_package(environment: dict[str, str], directory: str) -> bool:
    """Whether a program with this PYTHONPATH, in this directory, imports the server's package."""
    spec = importlib.util.find_spec(_NAME)
    own = os.path.realpath(spec.submodule_search_locations[0]) if spec else ""  # type: ignore[index]
    for entry in [directory, *environment.get("PYTHONPATH", "").split(os.pathsep)]:
        other = os.path.join(directory, entry, _NAME)
        if entry and os.path.isdir(other) and os.path.realpath(other) != own:
            return False
    return True


def _server_of(environment: dict[str, str], directory: str) -> ForkServer:
    is_plain = _allows_package and _server.is_set_as(environment)
    return _server if is_plain and _is_same_package(environment, directory) else _torch_server


_Popen: Any = subprocess.Popen
_util: Any = multiprocessing.util
_spawnv = _util.spawnv_passfds
_server, _torch_server = ForkServer(*PRELOADED, *PACKAGE), ForkServer(*PRELOADED)
_allows_package = True
# subprocess calls it alone to start a program; its arguments differ between versions.
_signature = inspect.signature(_Popen._execute_child)


class ForkingPopen(_Popen):  # type: ignore[misc]
    """A `subprocess.Popen` whose Python programs are forks of the server."""

    def _execute_child(self, *arguments: Any) -> None:
        given = _signature.bind(self, *arguments).arguments
        command, environment = given["args"], given["env"]
        command = [command] if isinstance(command, (str, os.PathLike)) else command
        command = [os.fsdecode(part) for part in command]
        environment = dict(os.environ if environment is None else environment)
        special = ("preexec_fn", "shell", "executable", "startupinfo", "creationflags")
        if any(given[name] for name in special) or not _server.can_run(command, environment):
            super()._execute_child(*arguments)
            return
        passed = sorted(given["pass_fds"])
        standard = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        sources = [fd if fd != -1 else number for number, fd in enumerate(standard)]
        directory = os.fspath(given["cwd"] or os.getcwd())
        program = Program(
            command[1:], environment, directory, [0, 1, 2, *passed], given["start_new_session"]
        )
        try:
            self.pid = _server_of(environment, directory).start(program, [*sources, *passed])
            self._child_created = True
        finally:
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in pipes))


def _fork_spawned(path: Any, arguments: Any, passed: Any) -> int:
    """Start what `multiprocessing` spawns: `spawnv_passfds`."""
    command = [os.fsdecode(part) for part in arguments]
    # What multiprocessing has put in front: it has no public name.
    own = _util._args_from_interpreter_flags()
    del command[1 : 1 + len(own)]  # the server has them
    environment, directory = dict(os.environ), os.getcwd()
    if not _server.can_run(command, environment):
        return int(_spawnv(path, arguments, passed))
    descriptors = [0, 1, 2, *sorted(passed)]
    program = Program(command[1:], environment, directory, descriptors, False)
    return _server_of(environment, directory).start(program, descriptors)


def preload(*modules: str) -> None:
    """Have the server import these, too, if they are installed; for the conftest of a folder."""
    _server.modules += modules


def install() -> None:
    """Let this process start Python programs as forks of a server, unless `SWITCH` is "0"."""
    if os.environ.get(SWITCH) == "0":
        return
    _replace_starters()
    _server.begin()
    _torch_server.begin()  # not later: a test would find its socket left over


def close() -> None:
    """End the servers."""
    _server.close()
    _torch_server.close()


def _replace_starters() -> None:
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    _util.spawnv_passfds = _fork_spawned


@contextlib.contextmanager
def new_interpreters() -> Iterator[None]:
    """Start new interpreters meanwhile, for tests of what an import does."""
    before = subprocess.Popen, _util.spawnv_passfds
    subprocess.Popen, _util.spawnv_passfds = _Popen, _spawnv  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen, _util.spawnv_passfds = before  # type: ignore[misc]


@contextlib.contextmanager
def without_package() -> Iterator[None]:
    """Start programs meanwhile that have not imported omni_kvlink."""
    global _allows_package
    _allows_package = False
    try:
        yield
    finally:
        _allows_package = True


def _serve(requests: socket.socket) -> Program | None:
    """Fork for each program; return it in the fork, and None when nobody can ask any more."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MAX_NBYTES, 64)
        if not message:
            return None
        program = Program(*json.loads(message))
        pid = _clone()
        if pid == 0:
            requests.close()
            _renumber(descriptors, program.descriptors)
            if program.new_session:
                os.setsid()  # and so that of all that it starts
            return _serve_nested(program) if NESTED in program.environment else program
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _serve_nested(program: Program) -> Program | None:
    """Fork a server for what the program starts; the program here, in the server as `_serve`."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_NBYTES)
    if os.fork():
        there.close()
        (_server if _NAME in sys.modules else _torch_server).use(here)
        _replace_starters()
        return program
    here.close()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in program.descriptors:  # the program's alone: whoever reads them waits for EOF
        os.dup2(null, descriptor)
    return _serve(there)


def _clone() -> int:
    """`os.fork`, but the new process is a child of this one's parent."""
    interpreter = ctypes.pythonapi
    libc = ctypes.PyDLL(None, use_errno=True)
    interpreter.PyOS_BeforeFork()
    pid = int(libc.syscall(_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        interpreter.PyOS_AfterFork_Child()
        return 0
    interpreter.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _renumber(descriptors: list[int], numbers: list[int]) -> None:
    """Give the descriptors their numbers."""
    lowest = max(numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, lowest) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run(program: Program) -> None:
    """Run a program as a new interpreter would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.directory)
    kind, *rest = program.arguments
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [os.path.abspath(entry) for entry in path]
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = program.arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    """Import what is slow, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, *modules = sys.argv[1:]
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != own]
    for name in modules:
        with contextlib.suppress(ImportError):
            __import__(name)
    sys.path[:] = [entry for entry in sys.path if entry not in _inherited_path()]
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
    gc.collect()
    gc.freeze()  # a fork's own collections skip what it shares
    program = _serve(socket.socket(fileno=int(descriptor)))
    if program is not None:
        _run(program)


def _inherited_path() -> list[str]:
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)


if __name__ == "__main__":
    main()
