"""What producer and consumer say to each other: small, typed, versioned, never an object's code."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, NoReturn, TypeAlias

import msgspec

from omni_kvlink._version import __version__
from omni_kvlink.errors import WireError

PROTOCOL = (1, 1)
"""The lowest and the highest protocol version this library speaks."""
MAX_MESSAGE = 64 << 10

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Address = Annotated[bytes, msgspec.Meta(max_length=8192)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
Outcome = Literal["read", "unread", "rejected"]
Ending = Literal["failed", "aborted", "expired", "closed"]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Hello(_Message, frozen=True, array_like=True, tag=True):
    """Both sides, first: the protocol versions spoken and who speaks (pids are reused).

    Producer: `nonce` is the same at each of its doors, and `transports` names them.
    """

    versions: tuple[Number, Number]
    boot_id: Text
    pid: Number
    started: Number
    nonce: Text
    library: Text
    transports: tuple[Text, ...] = ()


class Refused(_Message, frozen=True, array_like=True, tag=True):
    """The handshake failed."""

    reason: Text
    versions: tuple[Number, Number]


class Get(_Message, frozen=True, array_like=True, tag=True):
    """Consumer: give me `key`, now or as soon as it exists; streamed: as soon as it begins."""

    get_id: Number
    key: Text
    streamed: bool = False


class Cancel(_Message, frozen=True, array_like=True, tag=True):
    """Consumer: this want's deadline passed."""

    get_id: Number


class Memory(_Message, frozen=True, array_like=True, tag=True):
    """Producer: the descriptor beside this message is arena number `arena`."""

    arena: Number
    nbytes: Number


class Retire(_Message, frozen=True, array_like=True, tag=True):
    """Producer: this arena is gone; drop the mapping."""

    arena: Number


class Location(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload's slot lies: `nbytes` of payload behind the slot's head at `offset`."""

    arena: Number
    offset: Number
    nbytes: Number


class Offer(_Message, frozen=True, array_like=True, tag=True):
    """Producer: what you want lies here; it is yours until you release it.

    It is committed, unless `draft` says that a header without digests, of so many bytes, lies
    behind it: then its layers are announced one by one, and at last its commit.
    """

    get_id: Number
    epoch: Number
    location: Location
    draft: Number = 0
    direct: bool = False

    @property
    def first(self) -> tuple[int, int]:
        """Which bytes its reader needs first: all, or of a stream the draft behind it."""
        nbytes = self.location.nbytes
        return (nbytes, nbytes + self.draft) if self.draft else (0, nbytes)


class Layer(_Message, frozen=True, array_like=True, tag=True):
    """Producer: of a streamed payload the tensors from number `first` on are there.

    `digests` has one entry a tensor: four bytes a MiB, as the manifest holds them, or none.
    """

    get_id: Number
    first: Number
    digests: tuple[bytes, ...]


class Committed(_Message, frozen=True, array_like=True, tag=True):
    """Producer: a streamed payload is whole."""

    get_id: Number


class Status(_Message, frozen=True, array_like=True, tag=True):
    """Producer: the key is known, but there is nothing to offer yet; how far it is."""

    get_id: Number
    phase: Text


class Failed(_Message, frozen=True, array_like=True, tag=True):
    """Producer: there will be no payload for this want."""

    get_id: Number
    reason: Text
    ending: Ending


class Release(_Message, frozen=True, array_like=True, tag=True):
    """Consumer: the last view is gone (or the payload was never looked at, or was refused)."""

    get_id: Number
    epoch: Number
    outcome: Outcome
    reason: Text = ""


class FetchRange(_Message, frozen=True, array_like=True, tag=True):
    """Consumer, where no memory is shared: you may send me these bytes of what you offered.

    Bytes count from the payload's start; a draft's lie behind it.
    """

    get_id: Number
    epoch: Number
    start: Number
    stop: Number


class Chunk(_Message, frozen=True, array_like=True, tag=True):
    """Producer: beside this message travel fetched bytes, from `start` on."""

    get_id: Number
    epoch: Number
    start: Number


class Meet(_Message, frozen=True, array_like=True, tag=True):
    """Both sides, where bytes travel another way: where this one is reached.

    Consumer: with the secret that names each message of this connection.
    """

    address: Address
    secret: Secret = b""


class Abort(_Message, frozen=True, array_like=True, tag=True):
    """Consumer: nobody waits for this key any more."""

    key: Text
    reason: Text


Message: TypeAlias = (
    Hello
    | Refused
    | Get
    | Cancel
    | Memory
    | Retire
    | Offer
    | Layer
    | Committed
    | Status
    | Failed
    | Release
    | FetchRange
    | Chunk
    | Meet
    | Abort
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)  # type: ignore[arg-type, unused-ignore]


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """Raises WireError on anything but one whole message of a known kind."""
    try:
        message: Message = _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error}") from None
    return message


def short(reason: str) -> str:
    """A reason cut to what a message may carry."""
    return reason if len(reason) <= 4096 else reason[:4093] + "..."


def own_hello(nonce: str = "", transports: tuple[str, ...] = ()) -> Hello:
    """Who this process is: boot, pid and start time together are never reused."""
    nonce = nonce or os.urandom(8).hex()
    return Hello(PROTOCOL, _boot_id(), os.getpid(), _start_time(), nonce, __version__, transports)


def agree(theirs: tuple[int, int]) -> int | None:
    """The highest version both sides speak, or None."""
    highest = min(PROTOCOL[1], theirs[1])
    return highest if highest >= max(PROTOCOL[0], theirs[0]) else None


def unexpected(message: Message) -> NoReturn:
    raise WireError(f"{type(message).__name__} is not for this side to receive")


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def _start_time() -> int:
    """Clock ticks from boot to this process's start."""
    try:
        with open("/proc/self/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0
