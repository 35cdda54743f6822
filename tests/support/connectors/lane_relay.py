"""A relay between the two ends of lanes, which counts, cuts and changes what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from omni_kvlink.connectors.control.session_lanes import SessionLanes

if TYPE_CHECKING:
    import pytest

    from omni_kvlink.connectors.protocol.messages import LaneTicket


class LaneRelay:
    """Stands between the ends of all lanes that this process opens.

    Attributes:
        passed: bytes that went to consumers.
        seen: what went to consumers, in pieces.
        greetings: the first bytes of each lane, from its consumer.
        cut_at: if not 0, when so many bytes have passed, all lanes are cut, once.
        flip_at: if not 0, a bit of this byte is flipped, once.
        is_open: whether it lets new lanes through.
        flows: unset while nothing goes to consumers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.passed = self.cut_at = self.flip_at = 0
        self.seen, self.greetings = list[bytes](), list[bytes]()
        self.is_open, self.flows = True, threading.Event()
        self.flows.set()
        self._sockets: list[socket.socket] = []
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        on_ticket = SessionLanes.on_ticket

        def redirected(lanes: Any, ticket: LaneTicket) -> None:
            if ticket.port:
                ticket = msgspec.structs.replace(ticket, port=self._listen(ticket.port))
            on_ticket(lanes, ticket)

        monkeypatch.setattr(SessionLanes, "on_ticket", redirected)

    def cut(self) -> None:
        """Cut all lanes that are open."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.flows.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        for sock in (*self._sockets, *self._listeners):
            sock.close()

    def _listen(self, target: int) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners.append(listener)
        if not self.is_open:
            port = int(listener.getsockname()[1])
            listener.close()
            return port
        self._start(self._join, listener, target)
        return int(listener.getsockname()[1])

    def _join(self, listener: socket.socket, target: int) -> None:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        far = socket.create_connection(("127.0.0.1", target), 5)
        far.settimeout(None)
        self._sockets += near, far
        greeting = near.recv(4096)
        self.greetings.append(greeting)
        with contextlib.suppress(OSError):
            far.sendall(greeting)
        self._start(self._pass_up, near, far)
        self._pass_down(far, near)

    def _pass_up(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := near.recv(1 << 16):
                far.sendall(piece)
            far.shutdown(socket.SHUT_RDWR)

    def _pass_down(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := bytearray(far.recv(1 << 16)):
                with self._lock:
                    at, self.passed = self.flip_at - self.passed, self.passed + len(piece)
                    if self.flip_at and 0 <= at < len(piece):
                        self.flip_at = 0
                        piece[at] ^= 1
                    is_cut = 0 < self.cut_at <= self.passed
                    self.cut_at = 0 if is_cut else self.cut_at
                self.seen.append(bytes(piece))
                self.flows.wait()
                near.sendall(piece)
                if is_cut:
                    self.cut()
            near.shutdown(socket.SHUT_RDWR)

    def _start(self, function: Any, *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments))
        self._threads[-1].start()
