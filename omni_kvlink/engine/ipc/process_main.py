"""Main module of the processes that `ProcessHandle` starts.

Arguments: the channel's descriptor, and a directory to remove when the owner has ended, or "".
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import shutil
import signal
import socket
import sys

from omni_kvlink.engine.ipc.channel import RpcChannel
from omni_kvlink.engine.ipc.codec import unpack_config
from omni_kvlink.engine.ipc.rpc import SHUTDOWN_TIMEOUT, answer_call
from omni_kvlink.errors import PeerLostError


def main() -> None:
    """Make the service that the first message names, and serve its calls until the channel ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one shuts it down
    channel, directory = RpcChannel(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2]
    try:
        first = channel.receive()
    except PeerLostError:  # the owner was killed before it named a service
        _remove(directory)
        return
    sys.path += [path for path in first["path"] if path not in sys.path]
    module, _, name = first["service"].partition(":")
    kind = getattr(importlib.import_module(f"omni_kvlink.engine.{module}"), name)
    service = kind(unpack_config(first["config"]), *first["args"])
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


if __name__ == "__main__":
    main()
