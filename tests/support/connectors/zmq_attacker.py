"""A program that attacks a link on loopback as another user; its argument is JSON.

As root it becomes uid 65534. It prints "ready", then each message that it is sent, in hexadecimal
on a line of its own, until its input ends. A `client` sends what a consumer sends, a `server`
answers consumers as a producer does; with a `server_key` they use CURVE, and a key of their own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534


def main(action: str, port: str, messages: list[bytes], server_key: bytes = b"") -> None:
    """Attack until the standard input ends."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    with zmq.Context() as context:
        kind = zmq.DEALER if action == "client" else zmq.ROUTER
        with context.socket(kind) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            if server_key:
                public, secret = zmq.curve_keypair()
                socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
                if action == "server":
                    socket.setsockopt(zmq.CURVE_SERVER, 1)
                else:
                    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
                    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            endpoint = f"tcp://127.0.0.1:{port}"
            if action == "server":
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
                for message in messages:
                    socket.send(message)
            print("ready", flush=True)
            for frames in _attack(socket, messages):
                print(b"".join(frames).hex(), flush=True)


def _attack(socket: zmq.Socket[bytes], messages: list[bytes]) -> Iterator[list[bytes]]:
    """Give what arrives, and answer it as a server; until the standard input ends."""
    poller: Any = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if socket in ready:
            frames = socket.recv_multipart()
            yield frames
            if socket.getsockopt(zmq.TYPE) == zmq.ROUTER:
                for message in messages:
                    socket.send_multipart([frames[0], message])
        elif ready:
            return


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(
        given["action"],
        given["port"],
        [bytes.fromhex(message) for message in given["messages"]],
        given["server_key"].encode(),
    )
