"""Frames of a lane, their encryption, and the threads: common to both of its ends.

A lane is a TCP connection beside the control channel, for payloads' bytes alone, from the producer
to the consumer. The control channel authorises it, and carries its key.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

FRAME = 512 << 10
"""Bytes of the largest encrypted frame: it stays in a core's cache between socket and cipher."""
TAG = 16
"""Bytes behind an encrypted frame's."""
KEY = 32
TICKET_NAME, TICKET = 8, 40
"""Bytes of a ticket's name, which is looked up, and of all of it; the rest is compared."""
MAGIC = b"kvlane1\0"
GREETING = len(MAGIC) + TICKET
"""Bytes that a consumer sends on a lane; nothing follows."""
HEADER = struct.Struct("<QQQQ")
INSTALL = "pip install 'omni-kvlink[lanes]'"
_NONCE = 12
_MOST = 8
"""Lanes by default, at most: the interpreter runs one thread at a time beside the kernel's work."""
_SILENT = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS = 4000
"""Time without an answer after which the kernel ends a lane, as ZMQ does the control channel."""
_SYN_RETRIES = 2


class FrameHeader(NamedTuple):
    """The bytes of a payload that a frame carries: `nbytes` from `start` on."""

    get_id: int
    epoch: int
    start: int
    nbytes: int


OPENED = FrameHeader(0, 0, 0, 0)
"""The first frame, without bytes: the producer has accepted the lane."""


def count_lanes(lanes: int, *, is_encrypted: bool) -> int:
    """Return how many lanes the option `lanes=` allows: by default one for each core, with keys.

    Without encryption, one connection of ZMQ's moves bytes as fast as the cores of its ends can.
    """
    if lanes >= 0:
        return lanes
    return min(_MOST, len(os.sched_getaffinity(0))) if is_encrypted else 0


def lanes_refusal(count: int, *, is_encrypted: bool) -> str:
    """Return why an end of a link has no lanes, with the cure; "" if it has."""
    if not count:
        return "lanes=0"
    if not is_encrypted:
        return ""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        return f"a link with keys needs cryptography for them ({error}): {INSTALL}"
    if not hasattr(AESGCM, "encrypt_into"):
        return f"a link with keys needs cryptography 47 or later for them: {INSTALL}"
    return ""


class FrameCipher:
    """Encrypts or decrypts the frames of one lane, in their order, with AES-256-GCM.

    A frame's number is its nonce, and its header is authenticated with it: a frame that was
    changed, repeated, left out or moved does not open. A key is used for one lane only.
    """

    def __init__(self, key: bytes):
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._invalid_tag, self._number = AESGCM(key), InvalidTag, 0

    def seal(self, header: memoryview, data: memoryview, into: memoryview) -> None:
        """Encrypt the bytes of the next frame; `into` has room for them and `TAG` bytes."""
        self._cipher.encrypt_into(self._next_nonce(), data, header, into)

    def open(self, header: memoryview, sealed: memoryview, into: memoryview) -> None:
        """Decrypt the next frame; WireError if it is not authentic: `into` means nothing then."""
        try:
            self._cipher.decrypt_into(self._next_nonce(), sealed, header, into)
        except self._invalid_tag:
            raise WireError("a frame is not authentic: its bytes were changed on the way") from None

    def _next_nonce(self) -> bytes:
        nonce = self._number.to_bytes(_NONCE, "little")
        self._number += 1
        return nonce


class LaneThreads:
    """The threads of all lanes of a link's end, each an event loop; started with the first lanes.

    Methods are for the loop of the link's end.
    """

    def __init__(self, count: int):
        self._count, self._loops, self._next = count, list[EventLoop](), 0

    def take_loop(self) -> EventLoop:
        """Return a loop for another lane, in turn; CapacityError or OSError if none can start."""
        if len(self._loops) < self._count:
            self._loops.append(EventLoop("kvlink-lane"))
        self._next += 1
        return self._loops[self._next % len(self._loops)]

    def close(self) -> None:
        """End the threads; blocks until they have closed their lanes, which they were told to."""
        loops, self._loops = self._loops, []
        for loop in loops:
            loop.close()


def host_of(descriptor: int, *, is_own: bool = False) -> str:
    """Return the address of a connection's other end, or of its own; "" if it has ended."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return ""
    try:
        if connection.family == socket.AF_UNIX:
            return ""
        name = connection.getsockname() if is_own else connection.getpeername()
    except OSError:
        return ""
    finally:
        connection.detach()  # it is its owner's
    return str(name[0]).removeprefix("::ffff:")


def set_lane_options(lane: socket.socket) -> None:
    """Have the kernel send at once, and end a lane whose other end is silent for 4 s."""
    lane.setblocking(False)
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS),
        (socket.IPPROTO_TCP, socket.TCP_SYNCNT, _SYN_RETRIES),
        *((socket.IPPROTO_TCP, option, value) for option, value in _SILENT),
    ):
        lane.setsockopt(level, option, value)


def guarded(lose: Callable[[Exception], None], step: Callable[[], Any]) -> None:
    """Make a step of a lane; whatever it raises ends that lane alone."""
    try:
        step()
    except (BlockingIOError, InterruptedError):
        pass  # the socket has no more bytes, or no more room
    except Exception as error:
        lose(error)
