"""One rank's process: `python -m omni_kvlink.engine.executor.worker_main DESCRIPTOR`."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import socket
import sys

from omni_kvlink.engine.ipc.channel import RpcChannel
from omni_kvlink.engine.ipc.codec import unpack_config
from omni_kvlink.engine.ipc.process import serve_calls
from omni_kvlink.engine.worker.service import CLOSE_TIMEOUT, WorkerService


def main() -> None:
    """Serve the executor's calls until it closes the channel or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor shuts this process down
    channel = RpcChannel(socket.socket(fileno=int(sys.argv[1])))
    first = channel.receive()
    service = WorkerService(unpack_config(first["config"]), first["rank"], first["rank"])
    try:
        serve_calls(channel, service.methods)
    finally:
        # exits even if the model thread holds the interpreter's lock
        faulthandler.dump_traceback_later(2 * CLOSE_TIMEOUT, exit=True)
        is_closed = service.close()
        if first["rendezvous"]:  # an executor that was killed could not remove it
            shutil.rmtree(first["rendezvous"], ignore_errors=True)
        if not is_closed:
            os._exit(1)
        channel.join()


if __name__ == "__main__":
    main()
