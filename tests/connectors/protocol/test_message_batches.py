"""Several messages in one: as few as hold them, in their order, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from omni_kvlink import WireError
from omni_kvlink.connectors.protocol.messages import (
    MAX_BATCH,
    MAX_MESSAGE,
    MAX_TEXT,
    Batch,
    Get,
    Location,
    Message,
    Offer,
    Release,
    decode,
    decode_all,
    encode,
    encode_all,
)


def gets(count: int, nbytes: int = 10) -> list[Message]:
    return [Get(number, "k" * nbytes) for number in range(count)]


@pytest.mark.parametrize(
    ("messages", "parts"),
    [
        ([], 0),
        (gets(1), 1),
        (gets(MAX_BATCH), 1),
        (gets(MAX_BATCH + 1), 2),
        (gets(100, MAX_TEXT), 7),
        ([*gets(3), Release(1, 2, "rejected", "why"), Offer(1, 2, Location(0, 0, 9))], 1),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else None,
)
def test_as_few_as_hold_them(messages: list[Message], parts: int) -> None:
    encoded = encode_all(messages)
    assert len(encoded) == parts
    assert all(len(data) <= MAX_MESSAGE for data in encoded)
    assert [message for data in encoded for message in decode_all(data)] == messages


def test_an_inline_payload_among_others() -> None:
    inline = memoryview(bytes(range(256)) * 128)
    offers = [Offer(number, 1, Location(0, 0, len(inline)), inline=inline) for number in range(3)]
    encoded = encode_all(offers)
    assert len(encoded) == 3
    assert all(len(data) <= MAX_MESSAGE for data in encoded)
    assert [one for data in encoded for one in decode_all(data)] == offers


def test_one_alone_travels_as_ever() -> None:
    assert encode_all(gets(1)) == [encode(gets(1)[0])]
    assert decode_all(encode(gets(1)[0])) == gets(1)


def batch(*parts: bytes) -> bytes:
    return msgspec.msgpack.encode(Batch(tuple(map(msgspec.Raw, parts))))


GET = encode(Get(1, "k"))


@pytest.mark.parametrize(
    "data",
    [
        batch(),
        batch(*[GET] * (MAX_BATCH + 1)),
        batch(GET, batch(GET)),
        batch(GET, b"\xc0"),
        batch(GET, b"\x92\xa3Get\x01"),
        batch(GET)[:-1],
        batch(GET) + b"\0",
        msgspec.msgpack.encode(["Batch", 7]),
        msgspec.msgpack.encode(["Batch"]),
    ],
)
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_all(data)


def test_a_batch_is_refused_where_one_message_must_be() -> None:
    with pytest.raises(WireError, match="Batch"):
        decode(batch(GET))
