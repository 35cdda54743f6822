"""Reads a payload as docs/wire.md specifies it, step by step: `python wire_decoder.py FILE`."""
# ruff: noqa: D103, T201

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

ALIGN, MIB, MAX_HEADER = 256, 1 << 20, 1 << 20
CACHE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
               "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8"}  # fmt: skip
ITEMSIZE = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1, "F16": 2, "BF16": 2, "I16": 2,
            "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8}  # fmt: skip
PARTS = {"NHD": ("key", "value"), "ND": ("latent",)}
TABLE = list(range(256))
for _ in range(8):
    TABLE = [crc >> 1 ^ 0x82F63B78 * (crc & 1) for crc in TABLE]


def crc32c(data: bytes) -> str:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return f"{crc ^ 0xFFFFFFFF:08x}"


def check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)


def unique(pairs: list[tuple[str, object]]) -> dict:
    check(len(dict(pairs)) == len(pairs), "a key occurs twice")
    return dict(pairs)


def leaves(node: object, path: str) -> list[str]:
    if isinstance(node, dict):
        named = [(key.replace("~", "~0").replace("/", "~1"), node[key]) for key in node]
    elif isinstance(node, list):
        named = [(str(index), child) for index, child in enumerate(node)]
    else:
        check(type(node) is int and node == 0, f"{path} is no tensor")
        return [path]
    return [leaf for name, child in named for leaf in leaves(child, f"{path}/{name}")]


def names_of(branch: dict) -> list[str]:
    if "tree" in branch:
        return leaves(branch["tree"], branch["name"])
    check(sum(branch["kv_lens"]) == branch["seq_len"], "kv_lens do not add up to seq_len")
    check(len(branch["kv_lens"]) == len(branch["ropes"]) > 0, "one rope for each length")
    if "reuse" in branch or branch["seq_len"] == 0:
        return []
    parts = PARTS[branch.get("layout", "NHD")]
    layers = range(branch["num_layers"])
    return [f"{branch['name']}.{layer}.{part}" for layer in layers for part in parts]


def decode(payload: bytes) -> tuple[dict, dict[str, tuple[str, list[int], bytes]]]:
    """Return the manifest, and dtype, shape and bytes of each tensor by name."""
    length = int.from_bytes(payload[:8], "little")  # 1
    check(2 <= length <= min(MAX_HEADER, len(payload) - 8), f"header of {length} bytes")
    check((8 + length) % ALIGN == 0, "the data is not aligned")
    text, data = payload[8 : 8 + length], payload[8 + length :]
    check(text[:1] == b"{", "no JSON object")  # 2
    entries = json.loads(text.decode(), object_pairs_hook=unique)
    manifest = json.loads(entries.pop("__metadata__")["kvlink"], object_pairs_hook=unique)  # 3
    check(manifest["version"][0] == 1, f"version {manifest['version']}")
    blank = re.sub(rb'(header_crc32c\\":\\").{8}', rb"\g<1>00000000", text, count=1)  # 4
    check(crc32c(blank) == manifest["header_crc32c"], "the header was changed")
    at, tensors = 0, {}  # 5
    for name, entry in entries.items():
        start, stop = entry["data_offsets"]
        size = math.prod(entry["shape"]) * ITEMSIZE[entry["dtype"]]
        check(start == at and stop - start == size, f"{name} spans {start} to {stop}")
        at, is_padding = stop, name.startswith("pad.")
        check((stop if is_padding else start) % ALIGN == 0, f"{name} is not aligned")
        if not is_padding:
            tensors[name] = entry["dtype"], entry["shape"], data[start:stop]
    check(at == len(data) and not (entries and is_padding), "bytes behind the last tensor")
    named = [(name, branch) for branch in manifest["branches"] for name in names_of(branch)]  # 6
    check([name for name, _ in named] == list(tensors), "not the tensors that the branches have")
    for (name, branch), digest in zip(named, manifest["digests"], strict=True):  # 7
        dtype, shape, content = tensors[name]
        declared = (CACHE_CODES.get(branch.get("dtype", "")), branch.get("shape"))
        check("tree" in branch or declared == (dtype, shape), f"{name} is not as declared")
        chunks = [content[first : first + MIB] for first in range(0, len(content), MIB)]
        check(manifest["digest"] == "off" or digest == "".join(map(crc32c, chunks)), f"CRC: {name}")
    return manifest, tensors


if __name__ == "__main__":
    for name, (dtype, shape, _) in decode(Path(sys.argv[1]).read_bytes())[1].items():
        print(name, dtype, shape)
