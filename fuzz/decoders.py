"""Everything that decodes bytes of a peer or of a file, one function each, and its inputs.

A decoder may raise the errors that `DECODERS` names for it; any other exception is a fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from omni_kvlink import (
    KVCacheBundle,
    KVCacheTransferData,
    SameAs,
    SchemaError,
    TensorTransferData,
    WireError,
)
from omni_kvlink._native.host import crc32c
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.control.keys import read_all
from omni_kvlink.connectors.protocol import messages
from omni_kvlink.connectors.protocol.chunk_window import ChunkWindow
from omni_kvlink.connectors.protocol.get_table import GetRequest, GetState, GetTable
from omni_kvlink.connectors.protocol.inspection import inspected_page
from omni_kvlink.connectors.protocol.transfer import Transfer
from omni_kvlink.connectors.protocol.transfer_table import TransferTable
from omni_kvlink.connectors.registry import split_url
from omni_kvlink.connectors.ucx.addressing import seal, unseal
from omni_kvlink.engine.ipc import codec
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
from omni_kvlink.engine.tokens.outputs import KVSent
from omni_kvlink.errors import ConnectorError
from omni_kvlink.link.end_metadata import decode_extra, encode_extra
from omni_kvlink.link.kvlink import read_url
from omni_kvlink.lookup import messages as lookup
from omni_kvlink.lookup import tokens
from omni_kvlink.lookup.tokens import DIGEST_SIZE, digest
from omni_kvlink.memory.arena import ArenaPool
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.payload.bundle import PAYLOAD_KINDS, open_payload
from omni_kvlink.payload.chunk_requests import ChunkRequests, read_sizes
from omni_kvlink.payload.manifest import Manifest

CORPUS = Path(__file__).with_name("corpus")


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder, the errors that it documents, and inputs to begin with."""

    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]


def decode_message(data: bytes) -> None:
    """A message, or a batch, is decoded to what encodes to the same messages, or refused."""
    found = messages.decode_all(data)
    again = [one for part in messages.encode_all(found) for one in messages.decode_all(part)]
    assert again == found
    for message in found:
        _ = isinstance(message, messages.Offer) and message.first


LIVE = messages.LivePayload("k", 1, "leased", "memory", 9, 1, 1, 0, 0, 5, None, "shm")


def message_seeds() -> list[bytes]:
    location = messages.Location(0, 4096, 1000)
    sent: list[messages.Message] = [
        messages.own_hello("0123456789abcdef", ("shm", "zmq")),
        messages.Refused("why", (1, 1)),
        messages.Get(1, "k", True),
        messages.Cancel(1),
        messages.Memory(0, 8192),
        messages.Retire(0),
        messages.Offer(1, 3, location, 512, True),
        messages.Layer(1, 0, (b"1234", b"")),
        messages.Committed(1),
        messages.Status(1, "announced"),
        messages.Failed(1, "why", "expired"),
        messages.Release(1, 3, "rejected", "why"),
        messages.Reject(1, 3, "why"),
        messages.FetchRange(1, 3, 0, 100),
        messages.Chunk(1, 3, 0),
        messages.TransportAddress(b"address", b"secret"),
        messages.Abort("k", "why"),
        messages.Inspect(1, 7, 9, "k"),
        messages.Inspected(1, (LIVE,), 7, {"live": 1}, {"used": 2}),
        messages.Inspected(1, reason="why"),
    ]
    batches = messages.encode_all(sent[2:6]), messages.encode_all(sent[8:14])
    return [*map(messages.encode, sent), *(part for batch in batches for part in batch)]


def split(data: bytes) -> list[bytes]:
    """Several inputs of one: each has its length, a byte, before it."""
    parts = []
    while data:
        length, data = data[0], data[1:]
        parts.append(data[:length])
        data = data[length:]
    return parts


def joined(parts: list[bytes]) -> bytes:
    return b"".join(bytes([len(part)]) + part for part in parts)


def feed_consumer(data: bytes) -> None:
    """The consumer's table, which has two gets and a stream, is sent messages."""
    ignore: Callable[[object], None] = lambda message: None  # noqa: E731
    table = GetTable(partial(GetState, None), ignore, ignore, ignore)
    states = table.request([GetRequest("k"), GetRequest("k2", streamed=True)])
    for part in split(data):
        with contextlib.suppress(WireError):
            for message in messages.decode_all(part):
                table.on_message(message)
    table.close(WireError("the end"))
    assert all(state.answer.is_set() for state in states)


def feed_producer(data: bytes) -> None:
    """The producer's table, which has a payload and two streams, is sent messages."""
    freed = list[object]()
    table = TransferTable(lambda peer, message: None, freed.append)
    location = messages.Location(0, 0, 1000)
    whole, stream, growing = Transfer("k"), Transfer("k2"), Transfer("g")
    table.reserve([whole, stream, growing])
    table.commit([(whole, location)], 2, 100.0)
    table.layers.begin(stream, location, 100, 1)
    table.layers.begin(growing, location, 100, 2, window=ChunkWindow(2, 9))
    chunk = Transfer(growing.key, stream=growing)
    table.reserve([chunk])
    table.commit([(chunk, location)], 1, math.inf)
    for number, part in enumerate(split(data)):
        with contextlib.suppress(WireError):
            message, peer = messages.decode(part), "peer"
            if isinstance(message, messages.Get):
                table.on_get(peer, message, number)
            elif isinstance(message, messages.Cancel):
                table.on_cancel(peer, message.get_id)
            elif isinstance(message, messages.Release):
                get_id, epoch, outcome = message.get_id, message.epoch, message.outcome
                table.on_release(peer, get_id, epoch, outcome, message.reason, number)
            elif isinstance(message, messages.Reject):
                get_id, epoch = message.get_id, message.epoch
                table.on_reject(peer, get_id, epoch, message.reason, number)
            elif isinstance(message, messages.Abort):
                table.fail(message.key, message.reason, "aborted", number)
            elif isinstance(message, messages.FetchRange):
                table.find_leased(peer, message.get_id, message.epoch)
            elif isinstance(message, messages.Inspect):
                page = inspected_page(message, table, ArenaPool(Mapping.anonymous, 1).stats, number)
                data = messages.encode(page)
                assert messages.decode(data) == page
                assert len(data) <= messages.MAX_MESSAGE
                assert all(one.epoch > message.after for one in page.payloads)
        table.tick(number)
    table.on_peer_lost("peer")
    table.close("the end")
    table.abort(stream)
    table.abort(growing)
    transfers = whole, stream, growing, chunk
    assert sorted(map(id, freed)) == sorted(map(id, transfers)), "each is freed once"


def producer_seeds() -> list[bytes]:
    get, stream = messages.Get(1, "k"), messages.Get(2, "k2", True)
    release = messages.Release(1, 1, "read")
    rejected = messages.Release(2, 2, "rejected", "why")
    calls: list[list[messages.Message]] = [
        [get, release, get, release],
        [get, stream, messages.Cancel(1), rejected],
        [stream, messages.Reject(2, 2, "why"), get, messages.Reject(1, 1, "why"), release],
        [get, messages.Inspect(1), messages.Inspect(2, 1, 1, "k"), release, messages.Inspect(3)],
        [get, messages.Abort("k", "why"), messages.FetchRange(1, 1, 0, 10), release, release],
    ]
    return [joined([messages.encode(one) for one in some]) for some in calls]


def cache(request_id: str = "r") -> KVCacheTransferData:
    layers = [torch.arange(24, dtype=torch.float32).reshape(3, 2, 4) for _ in range(2)]
    blocks = {"key_cache": layers, "value_cache": layers}
    metadata = {"kv_lens": [3], "ropes": [3], "num_layers": 2, "extra": {"a": [1]}}
    return KVCacheTransferData(request_id, blocks, metadata=metadata)


def payloads() -> list[bytes]:
    """Whole payloads of each kind."""
    tensors = TensorTransferData("r", {"x": torch.arange(8), "y": [torch.zeros(2, 2)]}, {"m": 1})
    bundle = KVCacheBundle("r", {"gen": cache(), "cfg": SameAs("gen"), "t": tensors})
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate((cache(), tensors, bundle)):
            path = Path(folder, str(number))
            data.save(path)
            found.append(path.read_bytes())
    return found


def decode_header(data: bytes) -> None:
    """A header that is accepted is the header that its manifest encodes to, or equal to it."""
    manifest = Manifest.decode(data)
    assert manifest.nbytes == len(data)
    _use(manifest)


def sealed(data: bytes) -> bytes:
    """The JSON of a header, its own digest made right: without that nothing gets further."""
    header = data[: 1 << 16].ljust(len(data[: 1 << 16]) + -(len(data[: 1 << 16]) + 8) % 256)
    field = b'header_crc32c\\":\\"'
    at = header.find(field)
    if at >= 0:
        at += len(field)
        header = header[:at] + b"0" * 8 + header[at + 8 :]
        header = header[:at] + b"%08x" % crc32c(header) + header[at + 8 :]
    return struct.pack("<Q", len(header)) + header


def decode_sealed_header(data: bytes) -> None:
    """The same for headers whose digest is right; the payload is as long as the header says."""
    whole = sealed(data)
    try:
        Manifest.decode(whole, len(whole))
    except WireError as error:
        # "header and tensors end at byte N": decode it once more with that many.
        said = str(error).split()
        if not str(error).startswith("header and tensors end at byte"):
            raise
        _use(Manifest.decode(whole, int(said[6].rstrip(","))))


def _use(manifest: Manifest) -> None:
    """Names, layers and the kind of a manifest that was accepted can be used."""
    assert manifest.kind in PAYLOAD_KINDS
    names = [spec.where() for spec in manifest.tensors]
    layers = manifest.layers()
    assert sum(len(numbers) for _, _, numbers in layers) == len(names) == len(manifest.tensors)


def header_seeds() -> list[bytes]:
    return [data[8 : 8 + int.from_bytes(data[:8], "little")].rstrip() for data in payloads()]


def load_file(data: bytes) -> None:
    """A file is loaded as each kind of payload."""
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        for kind in PAYLOAD_KINDS.values():
            with contextlib.suppress(SchemaError):  # it holds another kind
                loaded = kind.load(f"/proc/self/fd/{fd}")
                assert all(view.nbytes >= 0 for view in loaded.tensors())
    finally:
        os.close(fd)


def open_received(data: bytes) -> None:
    """A payload that arrived is opened, and each of its tensors is read."""
    mapping = Mapping.anonymous(max(1, len(data)))
    mapping.region.view()[: len(data)] = data
    region = mapping.region.slice(0, len(data))
    manifest = Manifest.decode(region.view())
    for view in open_payload(manifest, region).tensors():
        assert isinstance(view, torch.Tensor)
        view.clone()


def take_chunk_apart(data: bytes) -> None:
    """The requests of a chunk: those that are accepted fit tensors of as many rows as they have."""
    sizes = read_sizes(data)
    rows = sum(sizes.sizes)
    hidden = torch.empty(1, dtype=torch.uint8).expand(2, rows) if rows < 2**40 else torch.empty(0)
    if sizes.difference([hidden.shape]):
        return
    found = ChunkRequests(sizes, TensorTransferData("r", {"hidden": hidden}))
    assert len(found) == len(sizes.sizes)
    assert [part["hidden"].shape[sizes.dim] for part in found.values()] == list(sizes.sizes)


def chunk_seeds() -> list[bytes]:
    every: list[tuple[object, ...]] = [
        (1, ["a", "b"], [3, 0]),
        (-1, ["a"], [70], ["a"], {"b": "why"}),
        (0, ["a"], [2], [], {}),
    ]
    return list(map(msgspec.msgpack.encode, every))


def plain(data: bytes) -> object:
    """Values of MessagePack; None if it is none."""
    try:
        return msgspec.msgpack.decode(data)
    except (ValueError, RecursionError):
        return None


def read_lookup(data: bytes) -> None:
    """The payload of a lookup, as each kind of message, and its tokens."""
    values = plain(data)
    if not isinstance(values, list) or len(values) != 2 or not isinstance(values[1], bytes):
        return
    found = torch.tensor(list(values[1]), dtype=torch.uint8)
    payload = TensorTransferData("key", {"tokens": found}, values[0])
    for kind in (lookup.LookupHello, lookup.Question, lookup.Found):
        with contextlib.suppress(SchemaError):
            lookup.read_message(payload, kind)
    with contextlib.suppress(SchemaError):
        question = lookup.read_message(payload, lookup.Question)
        prompt = lookup.read_prompt(payload, question)
        assert lookup.namespace_of(prompt) in (question.namespace, "")
        half = DIGEST_SIZE + tokens.count(prompt) // 2 * tokens.SIZE
        tokens.common(prompt, prompt[:half])
    lookup.read_found(payload, 3)


def lookup_seeds() -> list[bytes]:
    every = (
        lookup.Found(0),
        lookup.Found(3, "lookup/entry", 4, 2),
        lookup.LookupHello("lookup/inbox", "model", lookup.VERSION),
        lookup.Question("lookup/answer", 1.0, True, True),
        lookup.Question("lookup/answer", 1.0, namespace=digest({"salt": "a"}).hex()),
    )
    prompt = tokens.encode([1, 2, 3], None)[DIGEST_SIZE:]
    seeds = [msgspec.msgpack.encode([msgspec.to_builtins(one), prompt]) for one in every]
    return [*seeds, b"\x92" + b"\x91" * 2000]  # nested too deeply to be decoded


def decode_engine(data: bytes) -> None:
    """A message between the processes of an engine."""
    codec.unpack(plain(data))


def engine_seeds() -> list[bytes]:
    params = OmniDiffusionSamplingParams(height=8, seed=1)
    values = [
        {"number": 1, "method": "step", "args": [1, 2.5, None, True], "kwargs": {}},
        OmniDiffusionRequest("a cat", params, "r1"),
        {"number": 2, "value": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)},
        {"number": 3, "error": WireError("no")},
        DiffusionOutput("r1", kv_sent=KVSent(9, (1, 2))),
        (1, ("a", b"b")),
    ]
    return [msgspec.msgpack.encode(codec.pack(value)) for value in values]


def read_slot(data: bytes) -> None:
    """The head of a slot in shared memory: only the head that was written is the payload's."""
    mapping = Mapping.anonymous(messages.SLOT)
    region, epoch, nbytes = mapping.region.slice(0, messages.SLOT), 7, 1000
    region.view()[: min(len(data), messages.SLOT)] = data[: messages.SLOT]
    is_whole = messages.holds(region, epoch, nbytes, committed=True)
    head = bytes(region.view(0, 32))
    messages.write_head(region, epoch, nbytes, committed=True)
    assert is_whole == (head == bytes(region.view(0, 32)))


def read_address(data: bytes) -> None:
    """The URL of a link, and the address of a control channel."""
    text = data.decode(errors="replace")
    for protocol in ("tcp", "ipc"):
        with contextlib.suppress(ValueError):
            address = ControlAddress(protocol, text)
            _ = address.url, address.zmq_endpoint, address.is_local, address.is_ipv6
    with contextlib.suppress(ValueError):
        split_url(text)
    read_url(text, {})


def read_keys(data: bytes) -> None:
    """A directory of public keys with this file in it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "one.public").write_bytes(data)
        read_all(folder)


def read_end(data: bytes) -> None:
    """The metadata at the end of a stream: what is accepted encodes to what is read again."""
    values = decode_extra(data)
    with contextlib.suppress(SchemaError):  # too long, or a number that JSON cannot carry
        assert decode_extra(encode_extra(values)) == values


def read_ucx_address(data: bytes) -> None:
    unseal(data, own=seal(b"worker"))


DECODERS = {
    "messages": Decoder(decode_message, (WireError,), message_seeds),
    "consumer": Decoder(feed_consumer, (), lambda: [joined(message_seeds())]),
    "producer": Decoder(feed_producer, (), producer_seeds),
    "header": Decoder(decode_header, (WireError,), payloads),
    "sealed_header": Decoder(decode_sealed_header, (WireError,), header_seeds),
    "file": Decoder(load_file, (WireError,), payloads),
    "received": Decoder(open_received, (WireError,), payloads),
    "chunk": Decoder(take_chunk_apart, (WireError,), chunk_seeds),
    "end": Decoder(read_end, (WireError,), lambda: [b'{"first token":17,"nested":{"a":[1]}}']),
    "lookup": Decoder(read_lookup, (SchemaError,), lookup_seeds),
    "engine": Decoder(decode_engine, (WireError,), engine_seeds),
    "slot": Decoder(read_slot, (), lambda: [struct.pack("<8sQQQ", b"kvlslot1", 7, 1000, 7)]),
    "address": Decoder(
        read_address,
        (ValueError,),
        lambda: [b"zmq+tcp://[::1]:7000?quota=1&insecure=1", b"127.0.0.1:0", b"/run/kvlink/a"],
    ),
    "ucx_address": Decoder(read_ucx_address, (WireError,), lambda: [seal(b"worker")]),
    "keys": Decoder(read_keys, (ConnectorError,), lambda: [b"x" * 40 + b"\n"]),
}


def run(name: str, data: bytes) -> None:
    """Decode one input; documented errors are right."""
    decoder = DECODERS[name]
    with contextlib.suppress(*decoder.errors):
        decoder.decode(data)


def corpus(name: str) -> list[bytes]:
    """The inputs of a decoder: its seeds, and what a run found to reach other code."""
    folder = CORPUS / name
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [*DECODERS[name].seeds(), *(path.read_bytes() for path in found)]
