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
from omni_kvlink.engine.ipc.rpc import SHUTDOWN_TIMEOUT, Methods, RpcServer
from omni_kvlink.errors import PeerLostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.config import StageConfig

_MAIN = "omni_kvlink.engine.ipc.process_main"


class ProcessHandle:
    """A process that serves the calls of one service; an `RpcTransport`.

    The process exits when this one closes the channel, or ends.

    Args:
        service: class of the service below `omni_kvlink.engine`: "stage.service:StageService".
        config: first argument of the class.
        args: its other arguments.
        name: of the process, for errors.
        directory: a temporary directory that the process removes when it exits; none if empty.
        environment: variables of the process in addition to this one's.
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
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MAIN, str(there.fileno())],
                pass_fds=[there.fileno()],
                env={**os.environ, **(environment or {})},
            )
        self.pid = self._process.pid
        self._channel = RpcChannel(here)
        first = {"service": service, "config": pack_config(config), "args": list(args)}
        self._channel.send({**first, "directory": directory})

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended; a frozen one is alive."""
        return self._process.poll() is None

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


def serve_calls(channel: RpcChannel, methods: Methods) -> None:
    """In the process of a `ProcessHandle`: run calls until the channel is closed."""
    server = RpcServer(methods)
    with contextlib.suppress(PeerLostError):
        while True:
            server.handle(channel.receive(), channel.send)
