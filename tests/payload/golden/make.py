"""Makes the golden files of the format's present version: `python tests/payload/golden/make.py`.

A file that exists is never written again: what a released version wrote stays readable, byte for
byte. The tensors come from SHAKE-128 of their names, so they depend on no library's generator.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVMetadata, PrefixOf, SameAs, Shard
from omni_kvlink.copier import TorchCopier
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.payload.tensor_data import TensorTransferData

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.payload.bundle import Payload

HERE = Path(__file__).parent
PRODUCER = {"library": "golden", "host": "golden"}
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1} | {
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "uint16": 2,
}


def raw(name: str, nbytes: int) -> bytes:
    """The bytes of the tensor that the payload calls `name`."""
    return hashlib.shake_128(name.encode()).digest(nbytes)


def tensor(name: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
    data = bytearray(raw(name, math.prod(shape) * ITEMSIZE[dtype]))
    if not data:
        return torch.empty(*shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(tuple(shape))


def cache(
    branch: str, request_id: str, shape: Sequence[int], dtype: str, **about: Any
) -> KVCacheTransferData:
    parts = ("key", "value") if len(shape) == 3 else ("latent",)
    block_ids = about.pop("block_ids", ())
    metadata = KVMetadata(
        layout="NHD" if len(shape) == 3 else "ND",
        **{"kv_lens": (shape[0],), "num_layers": 2, **about},
    )
    layers = range(metadata.num_layers)
    blocks = {
        f"{part}_cache": [tensor(f"{branch}.{layer}.{part}", shape, dtype) for layer in layers]
        for part in parts
    }
    return KVCacheTransferData(request_id, blocks, block_ids, metadata)


def single() -> KVCacheTransferData:
    return cache("kv", "golden-1", (7, 2, 5), "bfloat16", kv_lens=(3, 4), ropes=(3, 1))


def bundle() -> KVCacheBundle:
    request_id = "golden-2 é \U0001f600"
    empty = KVMetadata((0,), (0,), num_layers=2, dtype="float16")
    nothing: list[torch.Tensor | None] = [None, None]
    return KVCacheBundle(
        request_id,
        {
            "cfg_text": PrefixOf("gen", 4, KVMetadata((4,), (4,), num_layers=2)),
            "gen": cache(
                "gen",
                request_id,
                (9, 3, 4),
                "float16",
                ropes=(5,),
                image_shape=(1024, 768),
                block_size=16,
                block_ids=(4, 2),
                extra={"steps": 50, "guidance": [4.0, 1.5, None], "é": {"deep": True}},
                shard=Shard(rank=1, world=2, heads=(3, 6)),
            ),
            "cfg_img": cache("cfg_img", request_id, (1, 3, 4), "int8", ropes=(1,)),
            "twin": SameAs("gen"),
            "none": KVCacheTransferData(
                request_id, {"key_cache": nothing, "value_cache": nothing}, (), empty
            ),
        },
    )


def mla() -> KVCacheTransferData:
    return cache("kv", "golden-3", (6, 70), "float32", ropes=(6,), num_layers=3)


def fp8() -> KVCacheTransferData:
    return cache("kv", "golden-4", (5, 1, 13), "float8_e4m3fn", ropes=(5,))


def tensors() -> TensorTransferData:
    def named(path: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return tensor(f"tensors/{path}", shape, dtype)

    return TensorTransferData(
        "golden-5",
        {
            "hidden": [named("hidden/0", (3, 5), "bfloat16"), named("hidden/1", (), "float64")],
            "a/b~c": {
                "0": named("a~1b~0c/0", (2, 0), "float32"),
                "": named("a~1b~0c/", (7,), "int8"),
            },
            "ids": named("ids", (2, 3), "int64"),
            "sizes": named("sizes", (9,), "uint16"),
            "nothing": [{}, []],
        },
        {"step": 7, "scale": [0.5, None], "é": {"deep": True}},
    )


def mixed() -> KVCacheBundle:
    request_id = "golden-6"
    ids = TensorTransferData(request_id, {"ids": tensor("prompt/ids", (4,), "int32")}, {"n": 4})
    kv = cache("gen", request_id, (3, 2, 4), "float16", ropes=(3,))
    return KVCacheBundle(request_id, {"prompt": ids, "gen": kv, "twin": SameAs("gen")})


CONTENTS: dict[tuple[int, int], dict[str, Callable[[], Payload]]] = {
    (1, 0): {"single_bf16": single, "bundle": bundle, "mla_float32": mla, "fp8": fp8},
    (1, 1): {"tensors": tensors, "mixed": mixed},
}
"""By the version of the format that a payload needs."""


def payload(data: Payload, producer: dict[str, str]) -> bytes:
    """What the library writes today, as if this producer had written it."""
    plan = data.plan()
    mapping = Mapping.anonymous(plan.nbytes)
    digests = TorchCopier().gather(data.tensors(), plan, mapping.region)
    manifest = msgspec.structs.replace(plan.with_digests(digests), producer=producer)
    return manifest.encode() + bytes(mapping.region.view(plan.header_nbytes))


FILES = {
    f"v{major}.{minor}_{name}": make
    for (major, minor), contents in CONTENTS.items()
    for name, make in contents.items()
}


if __name__ == "__main__":
    for stem, make in FILES.items():
        path = HERE / f"{stem}.safetensors"
        if not path.exists():
            path.write_bytes(payload(make(), PRODUCER))
            print(path.name)
