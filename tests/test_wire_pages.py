"""docs/wire.md and docs/protocol.md suffice: what follows them alone reads what this library sends.

The decoder is docs/wire_decoder.py; the two readers below know sockets and MessagePack, and nothing
of omni_kvlink.
"""

from __future__ import annotations

import array
import ast
import hashlib
import json
import mmap
import os
import re
import runpy
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
import zmq

from omni_kvlink import KVCacheTransferData, KVLink, TensorTransferData
from omni_kvlink.connectors.protocol import messages
from omni_kvlink.payload.manifest import Manifest
from support.payloads.random_caches import bits

if TYPE_CHECKING:
    from collections.abc import Callable

# Reaches into _HEAD, _MAGIC, _Message: the page specifies what the module encodes, byte for byte.

DOCS = Path(__file__).parents[1] / "docs"
GOLDEN = sorted((Path(__file__).parent / "payload" / "golden").glob("*.safetensors"))
if not DOCS.exists():
    pytest.skip("installed without the sources", allow_module_level=True)
DECODER = DOCS / "wire_decoder.py"
decode: Callable[[bytes], tuple[dict[str, Any], dict[str, tuple[str, list[int], bytes]]]]
CRC32C: Callable[[bytes], str]
decode, CRC32C = map(runpy.run_path(str(DECODER)).__getitem__, ("decode", "crc32c"))
SENT = {"hidden": torch.arange(60_000, dtype=torch.float32), "ids": [torch.arange(3)]}


def test_the_decoder_is_short_and_independent() -> None:
    tree = ast.parse(DECODER.read_text())
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= set(sys.stdlib_module_names)
    assert len(DECODER.read_text().splitlines()) <= 100


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_decoder_reads_every_golden_file(path: Path) -> None:
    manifest, tensors = decode(path.read_bytes())
    ours = Manifest.decode(path.read_bytes())
    assert list(tensors) == [spec.name for spec in ours.tensors]
    for spec in ours.tensors:
        dtype, shape, content = tensors[spec.name]
        assert (dtype, tuple(shape)) == (spec.dtype, spec.shape)
        assert content == hashlib.shake_128(spec.name.encode()).digest(spec.nbytes)
    assert manifest["request_id"] == ours.request_id
    assert [msgspec.convert(branch, type(ours.branches[0])) for branch in manifest["branches"]] == [
        *ours.branches
    ]


def test_the_decoder_reads_a_traced_header(tmp_path: Path) -> None:
    """A trace context is no newer than the format: the page alone suffices to read it."""
    data, path = TensorTransferData("req-1", {"x": torch.zeros(3)}), tmp_path / "payload"
    plan = data.plan()
    traced = plan.with_trace({"traceparent": f"00-{7:032x}-{7:016x}-01"})
    data.save(path)
    saved = path.read_bytes()
    header = traced.encode(Manifest.decode(saved).digests)
    manifest, tensors = decode(header + saved[plan.header_nbytes :])
    assert manifest["producer"] == traced.producer
    assert list(tensors) == ["tensors/x"]


def test_the_decoder_refuses_every_changed_byte() -> None:
    whole = next(path for path in GOLDEN if path.stem.endswith("mixed")).read_bytes()
    data = Manifest.decode(whole).header_nbytes
    covered = set(range(data))
    for spec in Manifest.decode(whole).tensors:
        covered |= set(range(data + spec.start, data + spec.stop))
    for at in sorted(covered)[::3]:
        changed = bytearray(whole)
        changed[at] ^= 4
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
            decode(bytes(changed))


def encode(manifest: dict[str, Any], tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A payload as the page says, by a writer that knows nothing of omni_kvlink."""
    entries: dict[str, Any] = {}
    data, digests = b"", []
    for name, (dtype, shape, content) in tensors.items():
        if gap := -len(data) % 256:
            span = [len(data), len(data) + gap]
            entries[f"pad.{len(entries)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": span}
            data += b"?" * gap
        span = [len(data), len(data) + len(content)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        data += content
        mib = range(0, len(content), 1 << 20)
        digests.append("".join(CRC32C(content[at : at + (1 << 20)]) for at in mib))
    head = {"version": [1, 0], "header_crc32c": "00000000", "digest": "crc32c", "digests": digests}
    note = json.dumps({**head, **manifest}, separators=(",", ":"))
    text = json.dumps({**entries, "__metadata__": {"kvlink": note}}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 256)
    text = text.replace(b"00000000", CRC32C(text).encode(), 1)
    return len(text).to_bytes(8, "little") + text + data


def test_the_library_reads_what_a_second_writer_wrote(tmp_path: Path) -> None:
    key, value = torch.randn(2, 300, 4, 256).to(torch.bfloat16)
    branch = {"name": "kv", "kv_lens": [100, 200], "ropes": [7, 9], "num_layers": 1}
    branch |= {"seq_len": 300, "dtype": "bfloat16", "shape": [300, 4, 256]}
    payload = encode(
        {"request_id": "req-1", "bundle": False, "branches": [branch], "producer": {}},
        {
            f"kv.0.{part}": ("BF16", [300, 4, 256], bits(tensor))
            for part, tensor in (("key", key), ("value", value))
        },
    )
    decode(payload)
    path = tmp_path / "second.safetensors"
    path.write_bytes(payload)
    found = KVCacheTransferData.load(path)
    assert found.metadata.ropes == (7, 9)
    assert all(map(torch.equal, found.tensors(), (key, value)))  # type: ignore[arg-type]


def test_the_page_lists_every_message_with_its_fields() -> None:
    page = (DOCS / "protocol.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z]\w+)` \| (`.*?|as above) \|", page, re.MULTILINE))
    rows["Hello"] = next(iter(re.findall(r"^\| `Hello` \| (`.*?) \|", page, re.MULTILINE)))
    classes = {
        name: value
        for name, value in vars(messages).items()
        if isinstance(value, type) and issubclass(value, messages._Message) and name[0] != "_"
    }
    assert rows.keys() == classes.keys()
    for name, row in rows.items():
        names = re.findall(r"`(\w+)`", row)
        for part in ("arena", "offset", "nbytes"):  # of the location
            if name == "Offer":
                names.remove(part)
        assert names == list(classes[name].__struct_fields__)
        optional = re.findall(r"\*`(\w+)`\*", row)
        assert optional == names[len(names) - len(classes[name].__struct_defaults__) :]
    example = re.search(r"`(\[\"Get\".*?\])` is `([0-9a-f ]+)`", page)
    assert example
    packed = msgspec.msgpack.encode(ast.literal_eval(example[1].replace("false", "False")))
    assert packed.hex(" ") == example[2]
    assert messages.decode(packed) == messages.Get(1, "req-1")


def test_the_page_has_the_codes_limits_and_slot() -> None:
    page = (DOCS / "protocol.md").read_text()
    assert f"at most {messages.MAX_MESSAGE:,} bytes" in page
    assert f"at most {messages.MAX_TEXT:,} characters" in page
    assert messages._HEAD.format == "<8sQQQ"
    assert messages.SLOT == 256
    assert f"`{messages._MAGIC.decode()}`" in page


def send(sock: socket.socket, *fields: object) -> None:
    sock.send(msgspec.msgpack.encode(fields))


def receive(sock: socket.socket) -> tuple[list[Any], int]:
    space = socket.CMSG_SPACE(4)
    data, ancillary, _, _ = sock.recvmsg(1 << 16, space)
    fds = array.array("i", b"".join(content for *_, content in ancillary))
    return msgspec.msgpack.decode(data), fds[0] if fds else -1


def check_payload(payload: bytes) -> None:
    manifest, tensors = decode(payload)
    assert manifest["branches"][0]["tree"] == {"hidden": 0, "ids": [0]}
    assert tensors["tensors/hidden"][2] == bits(SENT["hidden"])  # type: ignore[arg-type]


def test_a_second_reader_of_shared_memory(tmp_path: Path) -> None:
    with KVLink.serve("shm://page", directory=str(tmp_path), inline=0) as producer:
        receipt = producer.put(TensorTransferData("req-1", SENT))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(30.0)
            sock.connect(str(tmp_path / "page.sock"))
            send(sock, "Hello", [2, 2], "second")
            assert receive(sock)[0][:2] == ["Hello", [2, 3]]
            send(sock, "Get", 1, "req-1")
            (name, arena, nbytes), fd = receive(sock)
            assert (name, os.fstat(fd).st_size) == ("Memory", nbytes)
            offer, _ = receive(sock)
            assert offer[:2] == ["Offer", 1]
            epoch, (found, offset, length) = offer[2:4]
            assert found == arena
            with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
                os.close(fd)
                head = struct.unpack_from("<8sQQQ", memory, offset)
                assert head == (b"kvlslot1", epoch, length, epoch)
                check_payload(memory[offset + 256 : offset + 256 + length])
            send(sock, "Release", 1, epoch, "read")
            receipt.wait(timeout=30.0)


def test_a_second_reader_of_a_payload_inside_its_offer(tmp_path: Path) -> None:
    with KVLink.serve("shm://page", directory=str(tmp_path)) as producer:
        receipt = producer.put(TensorTransferData("req-1", {"ids": torch.arange(3)}))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(30.0)
            sock.connect(str(tmp_path / "page.sock"))
            send(sock, "Hello", [2, 2], "second")
            assert receive(sock)[0][0] == "Hello"
            send(sock, "Get", 1, "req-1")
            (name, get_id, epoch, (_, _, length), _, _, payload, *_), _ = receive(sock)
            assert (name, get_id, len(payload)) == ("Offer", 1, length)
            _, tensors = decode(payload)
            assert tensors["tensors/ids"][2] == bits(torch.arange(3))
            send(sock, "Release", 1, epoch, "read")
            receipt.wait(timeout=30.0)


def test_a_second_reader_over_zmq() -> None:
    with KVLink.serve("zmq+tcp://127.0.0.1:0", inline=0) as producer, zmq.Context() as context:
        receipt = producer.put(TensorTransferData("req-1", SENT))
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, 30_000)
            secret = Path(os.environ["XDG_RUNTIME_DIR"], "kvlink", "user.secret").read_bytes()[:40]
            dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            dealer.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(secret))
            dealer.connect(producer.url.removeprefix("zmq+"))

            def request(*fields: object) -> None:
                dealer.send(msgspec.msgpack.encode(fields))

            request("Hello", [2, 2], "second")
            assert msgspec.msgpack.decode(dealer.recv())[0] == "Hello"
            request("Get", 7, "req-1", True)
            name, get_id, epoch, (_, _, length), *_ = msgspec.msgpack.decode(dealer.recv())
            assert (name, get_id) == ("Offer", 7)
            payload = bytearray(length)
            half = length // 2
            for start, stop in ((half, length), (0, half)):
                request("FetchRange", 7, epoch, start, stop)
                head, content = dealer.recv_multipart()
                assert msgspec.msgpack.decode(head) == ["Chunk", 7, epoch, start]
                payload[start : start + len(content)] = content
            check_payload(bytes(payload))
            request("Release", 7, epoch, "read")
            receipt.wait(timeout=30.0)
