"""The messages between producer and consumer, and the head of a payload's slot in memory.

Messages are msgpack arrays of a tag (the class name) and typed, bounded fields. Decoding builds
these structs and nothing else. Fields may be renamed freely; their order is the wire format.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeAlias

import msgspec

from omni_kvlink.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.memory.region import Region

PROTOCOL = (2, 3)
"""The lowest and the highest protocol version that this library speaks."""
ANSWERS = 3
"""The lowest version whose producers know `Inspect`, `Contains`, and a `Get` that does not wait."""
MAX_MESSAGE = 64 << 10
"""Bytes of the longest message."""
INLINE = 32 << 10
"""Bytes of the longest payload that may travel inside its offer."""
DEFAULT_INLINE = 16 << 10
"""Bytes of the longest one that does, unless the link says otherwise: at 28 KiB, what it saves and
its copies were about equal (`kvlink-bench many --bytes 28672`, `--inline 0` and `--inline`)."""
MAX_BATCH = 256
"""Messages of the longest `Batch`."""
MAX_KEYS = 256
"""Keys of the longest `Contains`."""
MAX_TEXT = 4096
"""Characters of the longest text field."""
MAX_EXTRA = 4096
"""Bytes of the longest metadata at the end of a stream."""
MAX_ROWS = 256
"""Payloads of the longest `Inspected`."""

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Address = Annotated[bytes, msgspec.Meta(max_length=8192)]
Extra = Annotated[bytes, msgspec.Meta(max_length=MAX_EXTRA)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
Counts = Annotated[dict[Text, Number], msgspec.Meta(max_length=32)]
Outcome = Literal["read", "unread", "rejected"]
Ending = Literal["failed", "aborted", "expired", "closed", "complete", "missing"]


NOTHING = memoryview(b"")


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A message; none can be in a reference cycle, so that the garbage collector need not look."""


class Hello(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Both sides, first message: protocol versions, run of the process, how bytes can be had.

    A producer's `incarnation` is the same at each of its listeners; a consumer that receives its
    own is connected with itself. `transports` are a producer's: "shm", "ucx", "zmq",
    and "lanes" if it opens such beside "zmq". `require`: what the path of the bytes must be, as
    in `Options`; of an earlier version that has no such option, None.
    """

    versions: tuple[Number, Number]
    incarnation: Text
    transports: tuple[Text, ...] = ()
    require: tuple[Text, ...] | None = None


class Refused(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: the handshake failed, or the connection ends for this reason.

    Consumer: it ends the connection, whose path is not as required; nothing was requested.
    """

    reason: Text
    versions: tuple[Number, Number]


class Get(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Consumer: requests the payload `key`, now or when it is published.

    `get_id` is the consumer's number of this get, unique within the connection. `streamed`: offer
    it while it is still being written, too. An append stream is requested with its own `get_id`
    as `stream`, and the first chunk wanted as `chunk`; then each `chunk` with that get's number as
    `stream`. Without `waits` it fails if the producer has no such payload now.
    """

    get_id: Number
    key: Text
    streamed: bool = False
    stream: Number = 0
    chunk: Number = 0
    waits: bool = True


class Cancel(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Consumer: no longer waits for this get."""

    get_id: Number


class Memory(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: the file descriptor beside this message is arena number `arena`."""

    arena: Number
    nbytes: Number


class Retire(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: this arena was freed; unmap it."""

    arena: Number


class Location(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The slot of a payload: `nbytes` of payload behind the slot's head at `offset`."""

    arena: Number
    offset: Number
    nbytes: Number


class Offer(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: the payload of a get lies here and is leased to the consumer until its `Release`.

    A key that is put again has another epoch. `draft` counts the bytes of a header without digests
    that lies behind the payload: 0 if the payload is committed; else its layers are announced one
    by one, and at last its commit. The bytes of a `direct` one are sent from the caller's tensors,
    and are valid after the commit only. `inline`, unless it is empty, is the payload itself: then
    `location` has its length alone. `extra` is that of `Committed`, if the stream is committed.
    """

    get_id: Number
    epoch: Number
    location: Location
    draft: Number = 0
    direct: bool = False
    inline: memoryview = NOTHING
    extra: Extra = b""

    @property
    def first(self) -> tuple[int, int]:
        """The byte range that its consumer needs first: all, or of a stream the draft header."""
        nbytes = self.location.nbytes
        return (nbytes, nbytes + self.draft) if self.draft else (0, nbytes)


class Layer(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: of a streamed payload the tensors from number `first` on are written.

    One digest a tensor: four bytes a MiB, as in the manifest; b"" if digests are off.
    """

    get_id: Number
    first: Number
    digests: tuple[bytes, ...]


class Committed(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: a streamed payload is complete; `extra` is its metadata at its end, a JSON object.

    It is empty if the writer gave none.
    """

    get_id: Number
    extra: Extra = b""


class Status(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: the key exists, but cannot be offered yet; `phase` says why."""

    get_id: Number
    phase: Text


class Failed(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: there will be no payload for this get.

    "complete": its stream has no such chunk; "missing": there is none now, and the get does not
    wait.
    """

    get_id: Number
    reason: Text
    ending: Ending


class Release(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Consumer: ends its lease; "unread": another consumer may have it; "rejected" for `reason`."""

    get_id: Number
    epoch: Number
    outcome: Outcome
    reason: Text = ""


class Reject(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Consumer: the payload is not what was committed; the lease goes on until its Release."""

    get_id: Number
    epoch: Number
    reason: Text


class FetchRange(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Consumer without shared memory: requests bytes of an offered payload.

    Bytes count from the payload's start; those of a draft follow the payload's. They are sent by
    the lane of this number, or with 0 by the control channel.
    """

    get_id: Number
    epoch: Number
    start: Number
    stop: Number
    lane: Number = 0


class Chunk(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: the frame beside this message holds fetched bytes, from `start` on."""

    get_id: Number
    epoch: Number
    start: Number


class TransportAddress(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Both sides: the address of this side, as the transport that carries the bytes writes it.

    A consumer's secret is part of the tag of each message of this connection.
    """

    address: Address
    secret: Secret = b""


class OpenLane(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Consumer: asks for a lane, numbered by it, from a producer that has "lanes".

    A lane is a TCP connection beside the control channel, for bytes alone. `instead_of` is the
    number of one that has ended, or 0.
    """

    lane: Number
    instead_of: Number = 0


class LaneTicket(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: the lane is accepted at this port, once, by the ticket; or, without one, why not.

    `key` encrypts its frames; it is empty if the control channel is not encrypted either.
    """

    lane: Number
    port: Number = 0
    ticket: Secret = b""
    key: Secret = b""
    reason: Text = ""


class Abort(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Consumer: ends this key for both sides."""

    key: Text
    reason: Text


class Contains(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Consumer: asks which of these keys it would get at once; `query` is its number of this."""

    query: Number
    keys: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]


class Contained(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: the answer to `Contains`, for its keys in their order."""

    query: Number
    found: Annotated[tuple[bool, ...], msgspec.Meta(max_length=MAX_KEYS)]


class Inspect(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Consumer: asks for the live payloads with an epoch above `after`, `limit` of them at most.

    `prefix`: only those whose key begins so. `inspect_id` is the consumer's number of the question.
    """

    inspect_id: Number
    after: Number = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)] = MAX_ROWS
    prefix: Text = ""


class LivePayload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One payload that a producer has, as its owner sees it; no byte of it.

    Attributes:
        key: the request id.
        epoch: the producer's number of the put.
        state: "reserved", "streaming", "committed" or "leased"; one of the others, such as
            "released", if it has ended, and a disconnected reader alone has its memory.
        form: "memory"; "inline" (inside its offers); "stream" or "direct" (written while it is
            sent, or sent from the caller's tensors); "append" (an append stream) or "chunk".
        nbytes: of the payload; of an append stream those of the chunks it keeps, too, and of at
            most 4,096 of them.
        missing: readers that were declared and have not come.
        reading: gets that have it now.
        pinned: gets of disconnected readers whose process lives, and may still look at it.
        chunks: that an append stream keeps.
        age_ms: milliseconds since its memory was reserved.
        ttl_ms: milliseconds until it expires; None: never, or it is not committed.
        path: by which its readers got it, as in `Ledger.path`; "" before the first.
    """

    key: Text
    epoch: Number
    state: Text
    form: Text
    nbytes: Number
    missing: Number
    reading: Number
    pinned: Number
    chunks: Number
    age_ms: Number
    ttl_ms: Number | None
    path: Text

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by their names, as JSON values."""
        return msgspec.structs.asdict(self)


class Inspected(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Producer: the answer to `Inspect`; or, with a `reason`, why there is none.

    `resume` is the `after` of the next page; 0 if this is the last. The first page, and no other,
    has the numbers of all transfers and those of the memory, bytes and counts.
    """

    inspect_id: Number
    payloads: Annotated[tuple[LivePayload, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()
    resume: Number = 0
    transfers: Counts = {}
    memory: Counts = {}
    reason: Text = ""


class Batch(_Message, frozen=True, array_like=True, tag=True, gc=False):
    """Both sides: several messages in one, in their order; none is a Batch or has a descriptor."""

    messages: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]


FromConsumer: TypeAlias = (
    Refused | Get | Cancel | Release | Reject | FetchRange | OpenLane | Abort | Contains | Inspect
)
FromProducer: TypeAlias = (
    Refused
    | Memory
    | Retire
    | Offer
    | Layer
    | Committed
    | Status
    | Failed
    | Chunk
    | LaneTicket
    | Contained
    | Inspected
)
Message: TypeAlias = Hello | TransportAddress | FromConsumer | FromProducer
_BATCH_SPACE = 32
"""Bytes of a Batch beside its messages, at most."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message | Batch]
_DECODER = msgspec.msgpack.Decoder(Message | Batch)  # type: ignore[arg-type, unused-ignore]


_NO_MESSAGE = (msgspec.DecodeError, ValueError, RecursionError)
_NONE = "not a message of this protocol"

encode: Callable[[Message], bytes] = _ENCODER.encode
"""Returns a message as it travels."""


def encode_all(messages: Sequence[Message]) -> list[bytes]:
    """Return messages as they travel, in their order: as few as possible, of `MAX_MESSAGE` each."""
    if len(messages) == 1:
        return [encode(messages[0])]
    groups, nbytes = list[list[bytes]](), MAX_MESSAGE
    for data in map(encode, messages):
        nbytes += len(data)
        if nbytes > MAX_MESSAGE - _BATCH_SPACE or len(groups[-1]) == MAX_BATCH:
            groups.append([])
            nbytes = len(data)
        groups[-1].append(data)
    return [
        group[0] if len(group) == 1 else _ENCODER.encode(Batch(tuple(map(msgspec.Raw, group))))
        for group in groups
    ]


def decode(data: bytes | msgspec.Raw) -> Message:
    """Return the message that `data` holds; WireError if it is not exactly one, of a known kind."""
    try:
        message = _DECODER.decode(data)
    except _NO_MESSAGE as error:
        raise WireError(f"{_NONE}: {error}") from None
    if isinstance(message, Batch):
        raise WireError("a Batch, where one message must be")
    return message


def decode_all(data: bytes) -> list[Message]:
    """Return the message that `data` holds, or those of its Batch; WireError as for `decode`."""
    try:
        message = _DECODER.decode(data)
    except _NO_MESSAGE as error:
        raise WireError(f"{_NONE}: {error}") from None
    return list(map(decode, message.messages)) if isinstance(message, Batch) else [message]


def shorten(reason: str) -> str:
    """Return a reason as a message may carry it: cut, and lone surrogates escaped.

    Exceptions of the system have them, for a file name that is no UTF-8.
    """
    reason = reason.encode("utf-8", "backslashreplace").decode()
    return reason if len(reason) <= MAX_TEXT else reason[: MAX_TEXT - 3] + "..."


def own_hello(
    incarnation: str = "", transports: tuple[str, ...] = (), require: tuple[str, ...] = ()
) -> Hello:
    """Return the Hello of this side; a random incarnation tells a consumer's from every other."""
    return Hello(PROTOCOL, incarnation or os.urandom(8).hex(), transports, require)


def common_version(theirs: tuple[int, int]) -> int | None:
    """Return the highest protocol version that both sides speak, or None."""
    highest = min(PROTOCOL[1], theirs[1])
    return highest if highest >= max(PROTOCOL[0], theirs[0]) else None


def unexpected(message: Message) -> NoReturn:
    """Raise WireError: the other side must not send this kind of message."""
    raise WireError(f"{type(message).__name__} is not for this side to receive")


SLOT = 256
"""Bytes of a slot's head; the payload follows, so it keeps the alignment of an arena's blocks."""
_HEAD = struct.Struct("<8sQQQ")
_MAGIC = b"kvlslot1"


def write_head(slot: Region, epoch: int, nbytes: int, *, committed: bool) -> None:
    """Write the head of a slot; its commit word repeats the epoch once the payload is complete."""
    if slot.device == "cpu":  # no reader maps a device's memory
        slot.write(0, _HEAD.pack(_MAGIC, epoch, nbytes, epoch if committed else 0))


def holds(slot: Region, epoch: int, nbytes: int, *, committed: bool) -> bool:
    """Return whether a slot holds the payload that was offered, and completely if `committed`."""
    head = bytes(slot.view()[: _HEAD.size])
    whole = _HEAD.pack(_MAGIC, epoch, nbytes, epoch)
    return head == whole or (not committed and head == _HEAD.pack(_MAGIC, epoch, nbytes, 0))
