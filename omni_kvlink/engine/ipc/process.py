"""`ProcessHandle`: a process that this one starts, with an `RpcChannel` to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.ipc.channel import RpcChannel
from omni_kvlink.engine.ipc.codec import pack_config
from omni_kvlink.engine.ipc.rpc import SHUTDOWN_TIMEOUT

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
        program = [sys.executable, "-m", f"{__package__}.process_main"]
        with child_end:
            self._process = subprocess.Popen(
                [*program, str(child_end.fileno()), directory],
                pass_fds=[child_end.fileno()],
                env={**os.environ, **(environment or {})},
            )
        self.pid = self._process.pid
        self._channel = RpcChannel(parent_end)
        first = {"service": service, "config": pack_config(config), "args": list(args)}
        self._channel.send({**first, "path": sys.path})

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; see `RpcTransport.send`."""
        with contextlib.suppress(EngineDeadError):  # `receive` reports it, with the exit status
            self._channel.send(message)

    def receive(self) -> dict[str, Any]:
        """Wait for the next message; see `RpcTransport.receive`."""
        return self._channel.receive()

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
