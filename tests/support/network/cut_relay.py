"""A relay for all connections of a link over TCP, which counts what passes and cuts all at once."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from omni_kvlink.connectors.control.session_lanes import SessionLanes

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from omni_kvlink.connectors.protocol.messages import LaneTicket

_PIECE = 1 << 16


class CutRelay:
    """Forwards the control channel to a producer at `target`, and the lanes of this process.

    Attributes:
        port: where consumers connect.
        passed: bytes that went to consumers.
        cuts: when so many bytes have passed, all connections are cut; each once.
        before_cut: called in a thread of the relay before it cuts.
        is_open: whether it lets new connections through.
    """

    def __init__(self, target: int):
        self.passed, self.cuts, self.is_open = 0, list[int](), True
        self._is_closed = False
        self.before_cut: Callable[[], object] = bool
        self._sockets = list[socket.socket]()
        self._listeners = list[socket.socket]()
        self._threads = list[threading.Thread]()
        self._lock = threading.Lock()
        self.port = self.listen(target)

    def carry_lanes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have this process open its lanes through the relay."""
        on_ticket = SessionLanes.on_ticket

        def redirected(lanes: Any, ticket: LaneTicket) -> None:
            if ticket.port:
                ticket = msgspec.structs.replace(ticket, port=self.listen(ticket.port))
            on_ticket(lanes, ticket)

        monkeypatch.setattr(SessionLanes, "on_ticket", redirected)

    def listen(self, target: int) -> int:
        """Forward the connections to a new port, which is returned, to that of a producer."""
        return self._serve(socket.create_server(("127.0.0.1", 0)), target)

    def listen_for_lanes(self) -> int:
        """Forward lanes of other processes, which `send_lanes_to` sends here; return the port."""
        return self._serve(socket.create_server(("", 0)), None)

    def cut(self) -> None:
        """Cut all connections that are open, at once."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.is_open, self._is_closed = False, True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        for sock in (*self._sockets, *self._listeners):
            sock.close()

    def _serve(self, listener: socket.socket, target: int | None) -> int:
        self._listeners.append(listener)
        self._start(self._accept, listener, target)
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket, target: int | None) -> None:
        while not self._is_closed:
            try:
                near, _ = listener.accept()
            except OSError:
                continue  # the other end has gone, or `close`
            try:
                far = socket.create_connection(("127.0.0.1", target or _target_of(near)), 5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._sockets += near, far
            if not self.is_open:
                self.cut()
            self._start(self._pass, near, far, False)
            self._start(self._pass, far, near, True)

    def _pass(self, source: socket.socket, sink: socket.socket, is_counted: bool) -> None:
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                if is_counted and self._is_cut_by(len(piece)):
                    self.before_cut()
                    self.cut()
                sink.sendall(piece)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _is_cut_by(self, nbytes: int) -> bool:
        with self._lock:
            self.passed += nbytes
            is_cut = bool(self.cuts) and self.passed >= self.cuts[0]
            if is_cut:
                self.cuts.pop(0)
        return is_cut

    def _start(self, function: Any, *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments))
        self._threads[-1].start()


_NET = "127.1"
"""Where lanes of other processes are sent: the rest of the address is the producer's port."""


def send_lanes_to(port: int) -> None:
    """Have this process open its lanes through a relay's `listen_for_lanes`, all its life."""
    on_ticket = SessionLanes.on_ticket

    def redirected(lanes: Any, ticket: LaneTicket) -> None:
        if ticket.port:
            lanes._host = f"{_NET}.{ticket.port >> 8}.{ticket.port & 255}"  # private: no other way
            ticket = msgspec.structs.replace(ticket, port=port)
        on_ticket(lanes, ticket)

    SessionLanes.on_ticket = redirected  # type: ignore[assignment,method-assign]


def _target_of(near: socket.socket) -> int:
    """The port of the producer that a lane is for."""
    _, second, high, low = near.getsockname()[0].split(".")
    if second != _NET.partition(".")[2]:
        raise ConnectionRefusedError("no lane of a campaign")
    return int(high) << 8 | int(low)
