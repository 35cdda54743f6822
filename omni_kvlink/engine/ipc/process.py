"""`ProcessHandle`: a process that this one starts, with an `RpcChannel` to it.

`main` is what the process runs. Arguments: the channel's descriptor, and a directory to remove when
the owner has ended, or "".
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.ipc.channel import RpcChannel
from omni_kvlink.engine.ipc.codec import pack_config, unpack_config
from omni_kvlink.engine.ipc.rpc import SHUTDOWN_TIMEOUT, Call, Reply, Start, answer_call
from omni_kvlink.errors import PeerLostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.config import StageConfig


class ProcessHandle:
    """A process that serves the calls of one service; an `RpcTransport`.

    The service is "module:Class" below `omni_kvlink.engine`, and made of `config` and `args`. The
    process also imports modules from where this one does, such as that of a model of one's own. It
    exits when this one closes the channel, or ends, and removes `directory` then.
    """

    def __init__(
        self,
        service: str,
        config: StageConfig,
        args: Sequence[int] = (),
        *,
        name: str,
        directory: str = "",
        environment: Mapping[str, str] | None = None,
    ):
        self.name = name
        parent_end, child_end = socket.socketpair()
        program = [sys.executable, "-c", f"from {__name__} import main; main()"]
        with child_end:
            self._process = subprocess.Popen(
                [*program, str(child_end.fileno()), directory],
                pass_fds=[child_end.fileno()],
                env={**os.environ, **(environment or {})},
            )
        self.pid = self._process.pid
        self._channel = RpcChannel(parent_end)
        self._channel.send(Start(service, pack_config(config), list(args), sys.path))

    def send(self, message: Call) -> None:
        """Send a message; see `RpcTransport.send`."""
        with contextlib.suppress(EngineDeadError):  # `receive` reports it, with the exit status
            self._channel.send(message)

    def receive(self) -> Reply:
        """Wait for the next message; see `RpcTransport.receive`."""
        answer: Reply = self._channel.receive()
        return answer

    def describe_exit(self, error: Exception) -> str:
        """Wait until the process has ended; kill it if that takes long."""
        self._channel.close()
        self.join(SHUTDOWN_TIMEOUT)
        return f"{self.name}, process {self.pid}, ended with status {self._process.returncode}"

    def shutdown(self) -> None:
        """Close the channel, upon which the process exits; returns at once."""
        self._channel.close()

    def kill(self) -> None:
        """Kill the process; returns at once."""
        self._process.kill()

    def join(self, timeout: float) -> None:
        """Wait until the process has ended; kill it after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Release the channel and its shared memory."""
        self._channel.join()


def main() -> None:
    """Make the service that the first message names, and serve its calls until the channel ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one shuts it down
    channel, directory = RpcChannel(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2]
    try:
        first: Start = channel.receive()
    except PeerLostError:  # the owner was killed before it named a service
        _remove(directory)
        return
    sys.path += [path for path in first.path if path not in sys.path]
    module, _, name = first.service.partition(":")
    kind = getattr(importlib.import_module(f"omni_kvlink.engine.{module}"), name)
    service = kind(unpack_config(first.config), *first.args)
    try:
        with contextlib.suppress(PeerLostError):
            while True:
                answer_call(service.methods, channel.receive(), channel.send)
    finally:
        # exits even if a thread holds the interpreter's lock
        faulthandler.dump_traceback_later(2 * SHUTDOWN_TIMEOUT, exit=True)
        is_closed = service.close()
        _remove(directory)
        if not is_closed:
            os._exit(1)
        channel.join()


def _remove(directory: str) -> None:
    """Remove what an owner that was killed could not."""
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
