"""Random nested data as stages exchange them, and an exact comparison of what arrives."""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from msgspec.msgpack import Ext
from PIL import Image
from vllm_omni.data_entry_keys import HiddenStatesStruct, MetaStruct, OmniPayloadStruct

from omni_kvlink.integrations.vllm_omni.nested import AS_BYTES, AS_TENSOR, TOKEN

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
    ),  # the last is not sent as such
]
NUMPY = ["<f4", ">f8", "<i8", "u1", "?", "<c16", "<U3", "S5", "<M8[ns]", "<f2"]
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3), (4, 1, 5), (2,) * 9]


class Sub(torch.Tensor):
    """A subclass whose elements are the tensor's own."""


@dataclasses.dataclass
class Record:
    """A dataclass of an engine, with a tensor in it."""

    name: str
    value: Any


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from(DTYPES))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (nbytes,), generator=noise)
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)
    form = draw(st.sampled_from(["plain", "strided", "shared", "expanded", "grad", "own", "sub"]))
    if form == "strided" and tensor.dim():
        return tensor.transpose(0, -1)
    if form == "shared" and tensor.dim():
        return tensor[1:]
    if form == "expanded":
        return tensor.expand(3, *shape) if tensor.dim() < 8 else tensor
    if form == "grad" and dtype.is_floating_point and dtype.itemsize > 1:
        return tensor.requires_grad_()
    if form == "own":
        return torch.nn.Parameter(tensor, requires_grad=False)
    return tensor.as_subclass(Sub) if form == "sub" else tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape, dtype = draw(st.sampled_from(SHAPES)), np.dtype(draw(st.sampled_from(NUMPY)))
    if dtype.kind in "US":
        array = np.full(shape, "ab", dtype=dtype)
    else:
        count = math.prod(shape) * dtype.itemsize
        array = np.arange(count, dtype=np.uint8).view(dtype).reshape(shape)
    form = draw(st.sampled_from(["plain", "fortran", "step", "readonly"]))
    if form == "fortran":
        return np.asfortranarray(array)
    if form == "readonly":
        array.flags.writeable = False
    return array[::2] if form == "step" and array.ndim else array


images = st.sampled_from(["L", "RGB", "RGBA"]).map(
    lambda mode: Image.frombytes(mode, (5, 4), bytes(range(20)) * len(mode))
)
lookalikes = st.sampled_from(
    [
        *(Ext(code, TOKEN.encode() + bytes([0, 0, 0, n])) for code in (1, 2) for n in (0, 1)),
        *(Ext(AS_TENSOR, TOKEN.encode()), Ext(AS_BYTES, b""), Ext(7, b"\x00"), TOKEN),
        *(TOKEN.encode() * 2, f"x{TOKEN}{TOKEN[:5]}"),
        {"__tensor__": True, "dtype": "int16", "shape": [2], "data": b"\1\0\2\0"},
        {"__ndarray__": True, "dtype": "<i2", "shape": [2], "data": b"\1\0\2\0"},
        {"__tensor__": False, "data": b"x"},
        {"__tensor__": True, "data": b"x"},  # which the serializer itself cannot read
    ]
)
scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(width=64)),
    *(st.text(max_size=5), st.binary(max_size=5), st.builds(slice, st.integers(0, 3))),
    st.just(datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)),
)
keys = st.one_of(
    st.sampled_from(["a", "a.b", "a/b", "", "data", "tensors", "rest", TOKEN]),
    *(st.integers(0, 30), st.none(), st.binary(max_size=2), st.tuples(st.integers(0, 3))),
)


def _structs(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda hidden, layers, last: OmniPayloadStruct(
            hidden=hidden,
            hidden_states=HiddenStatesStruct(output=hidden, layers=dict(enumerate(layers))),
            meta=MetaStruct(finished=torch.tensor(last), left_context_size=3),
        ),
        *(tensors(), st.lists(tensors(), max_size=2), st.booleans()),
    )


nested = st.recursive(
    st.one_of(tensors(), arrays(), images, lookalikes, scalars),
    lambda children: st.one_of(
        *(st.lists(children, max_size=4), st.lists(children, max_size=3).map(tuple)),
        *(st.dictionaries(keys, children, max_size=4), _structs(children)),
        *(st.builds(Record, st.text(max_size=2), children), st.sets(st.integers(), max_size=3)),
    ),
    max_leaves=12,
)


def difference(mine: Any, theirs: Any, path: str = "") -> str:
    """The first thing that is not the same in type and bits, or ""."""
    if type(mine) is not type(theirs):
        return f"{path}: {type(mine).__name__}, wanted {type(theirs).__name__}"
    if isinstance(mine, dict):
        if repr(list(mine)) != repr(list(theirs)):
            return f"{path}: keys {list(mine)}, wanted {list(theirs)}"
        pairs = [(mine[key], theirs[key], f"{path}/{key!r}") for key in mine]
    elif isinstance(mine, (list, tuple)):
        if len(mine) != len(theirs):
            return f"{path}: {len(mine)} values, wanted {len(theirs)}"
        pairs = [(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(mine, theirs, strict=True))]
    elif hasattr(mine, "__dict__") and not isinstance(mine, (torch.Tensor, Image.Image)):
        pairs = [(vars(mine), vars(theirs), path)]
    else:
        return "" if _facts(mine) == _facts(theirs) else f"{path}: {mine!r}, wanted {theirs!r}"
    return next(filter(None, (difference(*pair) for pair in pairs)), "")


def _facts(leaf: Any) -> Any:
    """All that a user of a leaf can see of it, as values that compare exactly."""
    if isinstance(leaf, torch.Tensor):
        plain = leaf.reshape(-1).view(torch.uint8) if leaf.numel() else torch.empty(0)
        return (
            *(leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad, leaf.is_leaf),
            *(leaf.device, leaf.storage_offset(), leaf.untyped_storage().nbytes()),
            *(leaf.is_inference(), plain.tolist()),
        )
    if isinstance(leaf, np.ndarray):
        flags = (leaf.flags.writeable, leaf.flags.c_contiguous, leaf.strides)
        return leaf.dtype, leaf.shape, flags, leaf.tobytes()
    if isinstance(leaf, Image.Image):
        return leaf.mode, leaf.size, leaf.readonly, leaf.tobytes()
    if isinstance(leaf, Ext):
        return leaf.code, type(leaf.data), leaf.data
    return (leaf.hex() if isinstance(leaf, float) else leaf), repr(leaf)
