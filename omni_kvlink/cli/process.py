"""The process of a command: its signals, its errors and its exit status.

A command's work runs in a fork of the command's process, which itself imports nothing slow and only
waits for signals. So Ctrl-C ends a command at any moment, also while the fork imports torch: the
fork has a moment to close what it opened, then it and all that it started are killed, and the
directory in which their sockets and pipes lie is removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from omni_kvlink.errors import FileError, IntegrityError, KVLinkError
from omni_kvlink.system.failures import cure_of, translate_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE = 3.0
"""Seconds in which an interrupted fork may close what it opened, unless its arguments have a
`grace`; a second signal ends it at once."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHOW_CURSOR, _CLEAR_LINE = "\x1b[?25h", "\r\x1b[K"


def run_process(name: str, module: str, *, scratch: bool = False) -> int:
    """Run the command line of this process; return the exit status.

    `module` has `parse(argv)`, which imports nothing slow, and `perform(arguments)`, which returns
    the exit status and runs in a fork. With `scratch` the fork's sockets and temporary files lie in
    a directory of their own. From here on, this process blocks the signals that would end it.
    """
    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*heeded, signal.SIGCHLD])
    try:
        commands = import_module(module)
        arguments = commands.parse(sys.argv[1:])
    except SystemExit as done:  # --help, --version, wrong usage
        status = int(done.code or 0)
        return run_guarded(name, lambda: status)

    def work() -> int:
        for number in heeded:
            signal.signal(number, signal.SIG_IGN)  # a terminal sends them to the readers, too
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return run_guarded(name, lambda: int(commands.perform(arguments)))

    def supervise() -> int:
        with _scratch_directory() if scratch else contextlib.nullcontext():
            grace = getattr(arguments, "grace", _GRACE)
            return _supervise(name, work, [*heeded, signal.SIGCHLD], grace)

    return run_guarded(name, supervise)


def run_guarded(name: str, work: Callable[[], int]) -> int:
    """Run `work`, print an error of it in one line, and return the exit status."""
    try:
        status = work()
        show("", end="")  # what argparse printed
    except KeyboardInterrupt:
        return INTERRUPTED
    except (KVLinkError, OSError, MemoryError) as error:
        kind = type(error).__name__
        text = " ".join(str(error).split()) or "there is not enough memory"
        show(f"{name}: {kind}: {text}", to_stderr=True)
        return 1 if isinstance(error, IntegrityError) else 2
    return status


def show(text: str, *, to_stderr: bool = False, end: str = "\n") -> None:
    """Print a text, or nothing more once the reader has gone (`| head`), which is no error."""
    file = sys.stderr if to_stderr else sys.stdout
    if file is None:  # it was closed when the process started
        return
    try:
        print(text, file=file, end=end, flush=True)
    except OSError as error:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), file.fileno())
        if not isinstance(error, BrokenPipeError):
            name = "standard error" if to_stderr else "standard output"
            raise FileError(f"{name}: {error.strerror}; {cure_of(error.errno or 0)}") from None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the block by a KeyboardInterrupt, silently; elsewhere it kills the fork."""
    previous_handler = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)  # nobody wants to read what breaks now
    raise KeyboardInterrupt


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Have signals wait for the end of the block: a file is written whole, or not at all."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


@contextlib.contextmanager
def _scratch_directory() -> Iterator[None]:
    """Have sockets and temporary files lie in a new directory, which is removed at the end."""
    import shutil
    import tempfile

    from omni_kvlink.connectors.runtime.user_files import OTHER, default_directory

    base = os.path.dirname(default_directory())
    with translate_errors(base, OTHER):
        directory = tempfile.mkdtemp(prefix="kvlink-", dir=base)
    try:
        os.environ["XDG_RUNTIME_DIR"] = os.environ["TMPDIR"] = tempfile.tempdir = directory
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _supervise(
    name: str, work: Callable[[], int], watched: list[signal.Signals], grace: float
) -> int:
    """Run `work` in a fork; end it, and all that it started, when a signal comes."""
    for number in signal.sigpending() & {*_ENDING}:
        return _show_signal(name, number)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _run_fork(parent, work)
    ended_by, status = _wait(pid, watched, grace)
    _end_orphans()
    if status == INTERRUPTED or (ended_by and status < 0):
        return _show_signal(name, ended_by or signal.SIGINT)
    if status < 0:
        cause = signal.Signals(-status).name
        why = "; is there enough memory (`dmesg`)?" if cause == "SIGKILL" else ""
        show(f"{name}: the process was ended by {cause}{why}", to_stderr=True)
    return max(status, 2) if status < 0 else status


def _run_fork(parent: int, work: Callable[[], int]) -> NoReturn:
    status = 2
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it was killed before the line above
            status = work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)  # finalizers of what was interrupted could wait


def _wait(pid: int, watched: list[signal.Signals], grace: float) -> tuple[int, int]:
    """Wait for the fork; the signal that ended it or 0, and its exit status as `Popen` has it."""
    ended_by = 0
    while True:
        info = signal.sigtimedwait(watched, grace) if ended_by else signal.sigwaitinfo(watched)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return ended_by, os.waitstatus_to_exitcode(status)
        if info is None or (ended_by and info.si_signo != signal.SIGCHLD):
            os.kill(pid, signal.SIGKILL)
        elif info.si_signo != signal.SIGCHLD:
            ended_by = info.si_signo
            os.kill(pid, signal.SIGTERM)


def _end_orphans() -> None:
    """Kill what the fork left, and wait until all of it has ended."""
    import glob

    with contextlib.suppress(ChildProcessError):
        while True:
            for path in glob.glob("/proc/self/task/*/children"):
                with open(path) as file:
                    for child in file.read().split():
                        os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def _show_signal(name: str, number: int) -> int:
    if sys.stdout is not None and sys.stdout.isatty():
        show(_SHOW_CURSOR, end="")
    clear = _CLEAR_LINE if sys.stderr is not None and sys.stderr.isatty() else ""
    cause = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    show(f"{clear}{name}: {cause}", to_stderr=True)
    return 128 + number


def _prctl(option: int, value: int) -> None:
    """Set it if this kernel, or its sandbox, lets it be set."""
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
