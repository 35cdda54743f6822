"""One rank: `python -m omni_kvlink.engine.executor.worker_main DESCRIPTOR`."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import socket
import sys
import threading

from omni_kvlink.engine.ipc.channel import RpcChannel
from omni_kvlink.engine.ipc.codec import unpack_config
from omni_kvlink.engine.ipc.process_handle import serve_calls
from omni_kvlink.engine.worker.service import WorkerService

_END = 5.0
"""Seconds to end when the executor is gone; other ranks may wait for one that is gone, too."""


def serve(channel: RpcChannel) -> None:
    """Do what the executor calls, until it closes the channel or is gone."""
    first = channel.receive()
    service = WorkerService(unpack_config(first["config"]), first["rank"], first["rank"])
    args = (channel, service, first["meeting"])
    threading.Thread(target=_listen, args=args, name="calls", daemon=True).start()
    service.run()
    _clean(first["meeting"])


def _listen(channel: RpcChannel, service: WorkerService, meeting: str) -> None:
    try:
        serve_calls(channel, service.call)
    finally:
        faulthandler.dump_traceback_later(2 * _END, exit=True)  # whoever holds the interpreter
        service.stop()
        threading.main_thread().join(_END)
        _clean(meeting)  # not before: whoever is about to meet would wait for the directory
        os._exit(1)  # it waits for others, which are gone or will go


def _clean(meeting: str) -> None:
    """An executor that was killed could not."""
    if meeting:
        shutil.rmtree(meeting, ignore_errors=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor says when to end
    channel = RpcChannel(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(channel)
    finally:
        channel.release()


if __name__ == "__main__":
    main()
