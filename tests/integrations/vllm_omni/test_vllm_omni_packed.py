"""What the plug-in refuses to send, where its links are, and what it needs; without vLLM-Omni."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from omni_kvlink import (
    BusyError,
    KVCacheTransferData,
    KVConsumer,
    KVProducer,
    SchemaError,
    TensorTransferData,
    TransferTimeout,
    WireError,
)
from omni_kvlink.errors import UnavailableError
from omni_kvlink.integrations.vllm_omni import OmniSettings
from omni_kvlink.integrations.vllm_omni.links import Links
from omni_kvlink.integrations.vllm_omni.nested import AS_TENSOR, MIN_NBYTES, TOKEN, TakenTensors
from omni_kvlink.integrations.vllm_omni.packed import check_packed, header_of
from omni_kvlink.integrations.vllm_omni.payloads import KIND, Buffer, object_of, payload_of
from omni_kvlink.integrations.vllm_omni.stage_edges import Announcement, StageEdge, announced, find
from omni_kvlink.testing.rig import until
from support.connectors.keyless import is_let_in
from support.processes.absent import run

LAYERS, TOKENS, ROW = 2, 5, (2, 4)
NBYTES = TOKENS * 8 * 4


def header(**changes: Any) -> dict[str, Any]:
    """As the manager writes it; `td3={"s": [1]}` changes its third tensor."""
    tensors: list[dict[str, Any]] = [
        {
            "n": f"{name}_{layer}",
            "i": layer,
            "d": "float32",
            "s": [TOKENS, *ROW],
            "o": (LAYERS * at + layer) * NBYTES,
            "b": NBYTES,
        }
        for at, name in enumerate(("key_cache", "value_cache"))
        for layer in range(LAYERS)
    ]
    for name in [name for name in changes if name[:2] == "td" and name[2:].isdigit()]:
        tensors[int(name[2:])].update(changes.pop(name))
    meta = {"seq_len": TOKENS, "block_size": 2, "num_layers": LAYERS}
    return {"rid": "r", "bids": [3, 0, 2], "meta": meta, "td": tensors, "nl": LAYERS, **changes}


def packed(values: dict[str, Any], nbytes: int = 4 * NBYTES) -> bytes:
    text = json.dumps(values, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "big") + text + (bytes(range(256)) * 9)[:nbytes]


class PlainSerializer:
    """MessagePack; a tensor is a map with its bytes, or with a placeholder for it."""

    def encode(self, data: Any, taken: TakenTensors | None = None) -> bytes:
        def hook(value: Any) -> dict[str, Any]:
            if not isinstance(value, torch.Tensor):
                raise TypeError(type(value).__name__)
            placeholder = None if taken is None else taken.take(value)
            return {"tensor": placeholder or value.numpy().tobytes()}

        return msgspec.msgpack.encode(data, enc_hook=hook)

    def decode(self, data: memoryview, restore: Any = None) -> Any:
        return msgspec.msgpack.Decoder(ext_hook=restore).decode(data)


PLAIN = PlainSerializer()


def flat(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def test_a_complete_cache_is_taken() -> None:
    found = header_of(flat(packed(header())))
    assert found is not None
    check_packed(flat(packed(header())), *found)


META = {"seq_len": TOKENS, "block_size": 2}


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        (header(td1={"x": True}), "layer 1, K is missing"),
        (header(td2={"x": True}), "layer 0, V is missing"),
        (header(td3={"s": [TOKENS, 8]}), "layer 1: K is [5, 2, 4], V is [5, 8]"),
        (header(td0={"s": [4, 2, 5]}, td2={"s": [4, 2, 5]}), "layer 0 has 4 tokens"),
        (header(meta={"seq_len": 6}), "5 tokens, but seq_len is 6"),
        (header(meta={"seq_len": 0}), "5 tokens, but seq_len is 0"),
        (header(bids=[3, 0]), "2 blocks of 2 tokens for 5 tokens; 3 are needed"),
        (header(bids=[3, 0, -1]), "block id -1"),
        (header(bids=[3, 0, 2, -1]), "block id -1"),
        (header(bids=[3, 0, "2"]), "block id '2'"),
        (header(bids=[3, 0, 3]), "block id 3 appears twice"),
        (header(nl=3), "4 tensors for 3 layers"),
        (header(nl=0, td=[]), "without layers"),
        (header(td1={"n": "key_cache_0"}), "layer 0, K appears twice"),
        (header(td1={"n": "rope_1"}), "'rope_1' is not the K or V of a layer"),
        (header(td1={"d": "Tensor"}), "'Tensor' is not a dtype"),
        (header(td1={"b": NBYTES - 1}), "layer 1, K: bytes"),
        (header(td3={"o": 3 * NBYTES + 1}), "layer 1, V: bytes"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_an_incomplete_cache_is_refused(values: dict[str, Any], fields: str) -> None:
    with pytest.raises(SchemaError) as caught:
        payload_of("k", packed(values), PLAIN)
    assert fields in str(caught.value)


def test_a_header_that_is_not_the_managers_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"\$\.td\[0\]\.o"):
        payload_of("k", packed(header(td0={"o": -1})), PLAIN)


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"\0\0\0\2{}", packed({"rid": 1}), b"\xff" * 40, b"\0\0\0\1{" + b"x" * 9]
)
def test_other_bytes_are_only_bytes(data: bytes, ends: Ends) -> None:
    assert through(ends, data) == data


Ends = tuple[KVProducer, KVConsumer]


def through(ends: Ends, data: Any) -> Any:
    payload, nbytes = payload_of("k", data, PLAIN)
    ends[0].put(payload)
    result, there = object_of(ends[1].get("k", timeout=60), PLAIN, "full")
    assert there == nbytes
    return result


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, flat])
def test_a_packed_cache_is_seen_where_it_lies(kind: Any, ends: Ends) -> None:
    data = packed(header())
    payload, nbytes = payload_of("k", kind(data), PLAIN)
    receipt = ends[0].put(payload)
    received = ends[1].get("k", timeout=60)
    buffer, there = object_of(received, PLAIN, "full")
    assert isinstance(buffer, Buffer)
    assert nbytes == there == len(buffer) == len(data)
    assert buffer.tensor.numpy().tobytes() == data
    assert received.ledger.copies == 0
    assert not receipt.done
    buffer.release()
    receipt.wait(timeout=60)


def test_k_and_v_of_a_dict_travel_as_tensors(ends: Ends) -> None:
    layers = [torch.randn(TOKENS, *ROW).to(torch.bfloat16) for _ in range(2 * LAYERS)]
    blocks = {"key_cache": layers[::2], "value_cache": layers[1::2]}
    data = {"request_id": "r", "block_ids": [3, 0, 2], "metadata": {**META, "ropes": [1]}}
    payload, _ = payload_of("k", {**data, "layer_blocks": blocks}, PLAIN)
    sent = [tensor.data_ptr() for tensor in payload.tensors()[:-1]]  # type: ignore[union-attr]
    given = [*blocks["key_cache"], *blocks["value_cache"]]
    assert sent == [layer.data_ptr() for layer in given]  # by reference, not copied
    got = through(ends, {**data, "layer_blocks": blocks})
    for name, tensors in got.pop("layer_blocks").items():
        assert all(map(torch.equal, tensors, blocks[name]))
        tensors[0].zero_()  # its own memory
    assert got == data


@pytest.mark.parametrize(
    ("blocks", "fields"),
    [
        ({"key_cache": [None], "value_cache": [None]}, "layer 0, K is missing"),
        ({"key_cache": [torch.zeros(5, 2, 4)], "value_cache": [None]}, "layer 0, V is missing"),
        ({"key_cache": [torch.zeros(5, 2, 4)]}, "same number of layers"),
        ({"key_cache": [b"x"], "value_cache": [b"x"]}, "a bytes, expected tensors"),
        ({"key_cache": [torch.zeros(4, 2, 4)] * 1, "value_cache": [torch.zeros(4, 2, 4)]}, "4 tok"),
    ],
)
def test_an_incomplete_dict_is_refused(blocks: dict[str, Any], fields: str) -> None:
    with pytest.raises(SchemaError, match=fields):
        payload_of("k", {"layer_blocks": blocks, "metadata": META}, PLAIN)


def test_objects_that_are_no_data_are_refused() -> None:
    with pytest.raises(SchemaError, match="dict cannot be serialized"):
        payload_of("k", {"f": threading.Lock()}, PLAIN)


def test_what_another_program_put_is_refused(ends: Ends) -> None:
    about = {"kv_lens": [3], "ropes": [3], "num_layers": 1}
    layer = [torch.zeros(3, 2, 4)]
    ends[0].put(KVCacheTransferData("k", {"key_cache": layer, "value_cache": layer}, (), about))
    with pytest.raises(WireError, match="not sent by a vLLM-Omni connector"):
        object_of(ends[1].get("k", timeout=60), PLAIN, "full")


def test_another_kind_names_the_versions(ends: Ends) -> None:
    """As a connector of an earlier version does with "nested"."""
    ends[0].put(TensorTransferData("k", {"bytes": flat(b"x")}, {KIND: "later"}))
    with pytest.raises(WireError, match="kind 'later'; this version reads packed, object, cache"):
        object_of(ends[1].get("k", timeout=60), PLAIN, "full")


# ---- large tensors in nested data

LARGE = torch.arange(MIN_NBYTES, dtype=torch.float32).reshape(2, -1)


def test_large_tensors_travel_as_tensors(ends: Ends) -> None:
    data = {"a": [LARGE, LARGE.T], "b": {"c": LARGE[:, ::3]}, "n": 3}
    payload, _ = payload_of("k", data, PLAIN)
    assert payload.metadata == {KIND: "nested", "token": TOKEN}  # type: ignore[union-attr]
    *sent, rest = payload.tensors()
    assert [(tensor.data_ptr(), tensor.shape) for tensor in sent] == [  # type: ignore[union-attr]
        (tensor.data_ptr(), tensor.shape) for tensor in (LARGE, LARGE.T, LARGE[:, ::3])
    ]
    assert rest.shape[0] < 200
    got = through(ends, data)
    assert got["n"] == 3
    assert torch.equal(got["a"][0]["tensor"].add_(1), LARGE + 1)  # the receiver's own
    assert torch.equal(got["a"][1]["tensor"], LARGE.T)
    assert torch.equal(got["b"]["c"]["tensor"], LARGE[:, ::3])


def test_small_ones_do_not(ends: Ends) -> None:
    payload, _ = payload_of("k", {"a": LARGE[0, : MIN_NBYTES // 4 - 1]}, PLAIN)
    assert payload.metadata == {KIND: "object"}  # type: ignore[union-attr]


@pytest.mark.parametrize("text", [TOKEN, TOKEN * 2, f"{TOKEN}\0\0\0\0"])
def test_data_that_look_like_a_placeholder_stay_what_they_are(text: str, ends: Ends) -> None:
    mine = [text, text.encode(), msgspec.msgpack.Ext(AS_TENSOR, text.encode())]
    payload, _ = payload_of("k", {"t": LARGE, "mine": mine}, PLAIN)
    assert isinstance(payload, TensorTransferData)
    assert payload.metadata["token"] not in text
    got = through(ends, {"mine": mine, "t": LARGE})
    assert torch.equal(got["t"]["tensor"], LARGE)
    assert got["mine"][:2] == mine[:2]
    extension = got["mine"][2]
    assert (extension.code, extension.data) == (AS_TENSOR, text.encode())


@pytest.mark.parametrize("packed", [b"\xc0", msgspec.msgpack.encode({"t": 1})])
def test_a_tensor_without_a_place_is_an_error(packed: bytes, ends: Ends) -> None:
    tensors = {"tensors": [LARGE], "rest": flat(packed)}
    ends[0].put(TensorTransferData("k", tensors, {KIND: "nested", "token": TOKEN}))
    with pytest.raises(WireError, match="1 of 1 tensors have no place"):
        object_of(ends[1].get("k", timeout=60), PLAIN, "full")


# ---- names


@pytest.mark.parametrize(
    ("key", "channel"),
    [
        ("omni_0_to_1_kv_cache_req", "kv0"),
        ("omni_0_to_1_kv_cache_req_0_0_3_1", "kv0"),
        ("req_0_0_3_1", "kv3"),
        ("a_b_0_0_12_1", "kv12"),
        ("req_0_7", "data"),
        ("req_2_0_3_1", "data"),
        ("req", "data"),
    ],
)
def test_a_keys_link_is_read_from_the_key(key: str, channel: str) -> None:
    assert StageEdge.of("0", "1", key).channel == channel


def test_a_living_senders_name_is_its_own(sockets: str) -> None:
    path = f"{sockets}/a.url"
    first = Announcement(path, "zmq+tcp://127.0.0.1:1")
    assert announced(path) == find(path, timeout=0.0) == "zmq+tcp://127.0.0.1:1"
    with pytest.raises(BusyError, match="another sender has this name"):
        Announcement(path, "zmq+tcp://127.0.0.1:2")
    first.close()
    first.close()
    assert announced(path) == ""


def test_a_dead_senders_name_is_not_believed(sockets: str) -> None:
    path = f"{sockets}/a.url"
    code = (
        "import os, sys; from omni_kvlink.integrations.vllm_omni.stage_edges import Announcement\n"
        "kept = Announcement(sys.argv[1], 'zmq+tcp://127.0.0.1:1'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True)
    assert announced(path) == ""
    with pytest.raises(TransferTimeout):
        find(path, timeout=0.05)
    Announcement(path, "zmq+tcp://127.0.0.1:2").close()


def test_who_waits_for_a_name_is_woken(sockets: str) -> None:
    path = f"{sockets}/a.url"
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(find(path, timeout=3600.0)))
    waiting.start()
    until(Path(f"{path}.wait").exists, "a file is waited for")
    announcement = Announcement(path, "zmq+tcp://127.0.0.1:1")
    waiting.join()
    announcement.close()
    assert found == ["zmq+tcp://127.0.0.1:1"]


def test_a_receiver_follows_its_sender_to_another_port(sockets: str) -> None:
    settings = OmniSettings(transport="zmq+tcp", options={"directory": sockets})
    edge = StageEdge("0", "1", "kv0")
    receiving = Links(settings)
    for _ in range(2):
        serving = Links(settings)
        url = serving.sender(edge).url
        assert receiving.receiver(edge, timeout=60.0).url == url
        serving.close()
    receiving.close()


# ---- settings


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ({"transport": "tcp"}, "transport='tcp': wanted 'shm' or"),
        ({"trasnport": "shm"}, r"trasnport: no such setting; did you mean transport\?"),
        ({"addresses": {"kv0": "h:1"}}, "not for shm"),
        ({"readers": 0}, "readers=0: wanted a whole number from 1"),
        ({"readers": 1.5}, "readers=1.5: wanted a whole number"),
        ({"wait": "5"}, "wait='5': wanted a number of seconds"),
        ({"ttl": -1}, "ttl=-1: wanted a number of seconds above 0"),
        ({"verify": "some"}, "verify='some': wanted 'auto'"),
        ({"options": {"quotum": 1}}, r"options.quotum: no such setting; did you mean quota\?"),
        ({"sender": {"kees": "x"}}, r"sender.kees: no such setting; did you mean keys\?"),
        ("shm", "kvlink='shm': wanted a map"),
        ({"options": {"insecure": "false"}}, "options.insecure='false': wanted true or false"),
        ({"receiver": {"trusted_network": "false"}}, "receiver.trusted_network='false'"),
        ({"options": {"quota": 5}, "sender": {"prefault": 6}}, "sender.prefault=6: not within"),
        ({"addresses": {"kv0": 7000}, "transport": "zmq+tcp"}, "addresses.kv0=7000: wanted a text"),
        ({"name": None}, "name=None: wanted a text"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(section: Any, fields: str) -> None:
    with pytest.raises(ValueError, match=fields):
        OmniSettings.of({"stage_id": 0, "kvlink": section})


@pytest.mark.parametrize("message", ["false", False, True])
@pytest.mark.parametrize("side", ["options", "sender"])
def test_a_keyless_peer(side: str, message: Any) -> None:
    """A sender with insecure="false" is refused; with false it keeps peers without keys out."""
    section = {
        "transport": "zmq+tcp",
        "addresses": {"kv0": "127.0.0.1:0"},
        side: {"insecure": message},
    }
    if message == "false":
        with pytest.raises(SchemaError, match=rf"^kvlink: {side}\.insecure='false': wanted true"):
            OmniSettings.of({"kvlink": section})
        return
    links = Links(OmniSettings.of({"kvlink": section}))
    try:
        assert is_let_in(links.sender(StageEdge("0", "1", "kv0")).url) == message
    finally:
        links.close()


def test_what_vllm_omni_puts_beside_is_its_own() -> None:
    assert (
        OmniSettings.of({"stage_id": 0, "role": "sender", "codec_chunk_frames": 3})
        == OmniSettings()
    )


def test_a_channel_without_address_is_named() -> None:
    settings = OmniSettings(transport="zmq+tcp", addresses={"kv0": "10.0.0.5:7000"})
    assert StageEdge("0", "1", "kv0").url(settings) == "zmq+tcp://10.0.0.5:7000"
    with pytest.raises(SchemaError, match="not 'data', which stage 0 needs"):
        StageEdge("0", "1", "data").url(settings)


# ---- vLLM-Omni is not there

ABSENT = """
import json, sys
sys.modules["vllm_omni"] = None  # as if it were not installed
import omni_kvlink.integrations
from omni_kvlink.integrations import vllm_omni
found = [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_omni", "zmq")]
try:
    vllm_omni.register()
except ImportError as error:
    print(json.dumps([found, type(error).__name__, str(error)]))
"""


def test_without_vllm_omni_it_says_what_to_install() -> None:
    found, kind, fields = json.loads(run(ABSENT, preloaded=False))
    assert found == ["vllm_omni"]
    assert kind == UnavailableError.__name__
    assert "pip install --no-deps vllm-omni" in fields
