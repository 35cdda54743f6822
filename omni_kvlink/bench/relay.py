"""Relays standard input and output over TCP: `python relay.py HOST PORT`.

The first line that it sends is the token of the environment, see `remote_address`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

TIMEOUT = 20.0


def main() -> None:
    """Relay until either side ends."""
    host, port = sys.argv[1:]
    with socket.create_connection((host, int(port)), TIMEOUT) as connection:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(os.environ["KVLINK_BENCH_TOKEN"].encode() + b"\n")

        def relay_replies() -> None:
            with contextlib.suppress(OSError):
                while data := connection.recv(1 << 16):
                    os.write(1, data)
            os._exit(0)

        replies = threading.Thread(target=relay_replies)
        replies.start()
        with contextlib.suppress(OSError):
            while data := os.read(0, 1 << 16):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        replies.join()


if __name__ == "__main__":
    main()
