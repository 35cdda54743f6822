"""Real processes of the commands, in a terminal of their own, that interrupt themselves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from support.processes.fork_server import new_interpreters

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what ends in &
master, event, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
del sys.argv[1:4]
started = False

def press(found, arguments):
    global number, started
    what = f"{found} {arguments[0] if arguments else ''}"
    started = started or what == "import {first}"
    if started and event in ("", what):
        number -= 1
        if number == 0:
            os.write(master, b"\\x03")

sys.addaudithook(press)
from {module} import main
sys.exit(main())
"""
"""A command that presses Ctrl-C in its terminal at an audit event, the number-th of its kind.

What comes before the command's own first line, which blocks signals, is Python's.
"""
MODULES = {
    "kvlink": ("omni_kvlink.cli.main", "omni_kvlink.cli.arguments"),
    "kvlink-bench": ("omni_kvlink.bench.cli", "argparse"),
}


class Terminal:
    """A command in a new session with a pseudo terminal; `output` is what it has shown so far."""

    def __init__(
        self, command: Sequence[str], folder: Path, *, event: str = "never", number: int = 1
    ):
        self.master, slave = os.openpty()
        self.before = termios.tcgetattr(slave)
        self.output, self._seen = b"", threading.Condition()
        program = INTERRUPTING
        for name, value in zip(("{module}", "{first}"), MODULES[command[0]], strict=True):
            program = program.replace(name, value)
        with new_interpreters():
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", program, str(self.master), event, str(number)),
                    *command[1:],
                ],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                pass_fds=[self.master],
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                env={**os.environ, "XDG_RUNTIME_DIR": str(folder), "COLUMNS": "80"},
            )
        self._slave = slave
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def press_ctrl_c(self) -> None:
        os.write(self.master, b"\x03")

    def wait_for(self, text: bytes) -> None:
        """Wait until the command has shown a text."""
        with self._seen:
            assert self._seen.wait_for(lambda: text in self.output, 120), self.output

    def wait(self) -> tuple[int, str]:
        """The exit status, and all that was shown."""
        try:
            status = self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.after = termios.tcgetattr(self._slave)
        os.close(self._slave)  # nobody else has it: the reading ends
        self._reader.join(120)
        assert not self._reader.is_alive(), f"a process has the terminal: {self.session()}"
        os.close(self.master)
        return status, self.output.decode()

    def session(self) -> list[int]:
        """The processes of the command's session that have not ended."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(path.parent.name))
        return found

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: the last one that had the terminal closed it
            while data := os.read(self.master, 1 << 16):
                with self._seen:
                    self.output += data
                    self._seen.notify_all()
