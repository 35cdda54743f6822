"""Every way in which a tensor leaves a process, and every kind of tensor that torch makes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVConsumer, KVLink, KVProducer
from omni_kvlink import TensorTransferData as Data
from omni_kvlink.payload.dtypes import DTYPES, KV_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Change: TypeAlias = "Callable[[], None]"
Way: TypeAlias = "Callable[[Links, torch.Tensor, Change], torch.Tensor]"


class Links:
    """A producer and its consumer, and a directory for files."""

    def __init__(self, producer: KVProducer, consumer: KVConsumer, directory: Path):
        self.producer, self.consumer, self.directory = producer, consumer, directory
        self._count = 0

    def name(self) -> str:
        """A request id that was not used before."""
        self._count += 1
        return f"r-{self._count}"

    def get(self, name: str) -> Any:
        return self.consumer.get(name, timeout=60)


@contextlib.contextmanager
def links(directory: Path, name: str, copier: str, inline: int) -> Iterator[Links]:
    url = f"shm://{name}"
    with (
        KVLink.serve(url, copier=copier, inline=inline) as producer,
        KVLink.connect(url, timeout=60) as consumer,
    ):
        yield Links(producer, consumer, directory)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor of the same shape and dtype."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
    except RuntimeError:  # it has no shape, or an irregular one
        return torch.empty(5, 4, 6)


def put(to: Links, tensor: torch.Tensor, change: Change) -> torch.Tensor:
    data = Data(to.name(), {"x": tensor})
    change()
    to.producer.put(data)
    with to.get(data.request_id) as received:
        return received["x"].clone()  # type: ignore[no-any-return]


def put_again(to: Links, tensor: torch.Tensor, change: Change) -> torch.Tensor:
    """With a layout that is known from a payload before."""
    before = Data(to.name(), {"y": like(tensor)})
    to.producer.put(before)
    to.get(before.request_id).release()
    data = Data(to.name(), {"y": tensor})
    change()
    to.producer.put(data)
    with to.get(data.request_id) as received:
        return received["y"].clone()  # type: ignore[no-any-return]


def put_many(to: Links, tensor: torch.Tensor, change: Change) -> torch.Tensor:
    batch = [Data(to.name(), {"x": torch.ones(3)}), Data(to.name(), {"x": tensor})]
    change()
    to.producer.put_many(batch)
    to.get(batch[0].request_id).release()
    with to.get(batch[1].request_id) as received:
        return received["x"].clone()  # type: ignore[no-any-return]


def append(to: Links, tensor: torch.Tensor, change: Change) -> torch.Tensor:
    name = to.name()
    with to.producer.open_stream(name, {"x": tensor}) as out:
        change()
        out.append({"x": tensor})
        out.commit()
        with to.consumer.read_stream(name, timeout=60) as chunks:
            (found,) = [chunk.data["x"].clone() for chunk in chunks]
            return found  # type: ignore[no-any-return]


def allocate(to: Links, tensor: torch.Tensor, change: Change) -> torch.Tensor:
    """One tensor lies in the allocated memory, the other one does not."""
    name = to.name()
    plan = Data.blank(name, {"in": torch.empty(3), "x": tensor})
    allocation = to.producer.allocate(plan)
    try:
        data = Data(name, {"in": allocation.data["in"], "x": tensor})
        change()
        to.producer.put(data)
    finally:
        allocation.release()
    with to.get(name) as received:
        return received["x"].clone()  # type: ignore[no-any-return]


def save(to: Links, tensor: torch.Tensor, change: Change) -> torch.Tensor:
    data = Data(to.name(), {"x": tensor})
    change()
    data.save(to.directory / "saved.safetensors")
    return Data.load(to.directory / "saved.safetensors")["x"]  # type: ignore[no-any-return]


def _about(tensor: torch.Tensor) -> dict[str, Any]:
    return {"kv_lens": [tensor.shape[0]], "ropes": [0], "num_layers": 1}


def _cache(name: str, tensor: torch.Tensor) -> KVCacheTransferData:
    blocks = {"key_cache": [like(tensor)], "value_cache": [tensor]}
    return KVCacheTransferData(name, blocks, (), _about(blocks["key_cache"][0]))


def put_cache(to: Links, tensor: torch.Tensor, change: Change) -> torch.Tensor:
    cache = _cache(to.name(), tensor)
    change()
    to.producer.put(cache)
    with to.get(cache.request_id) as received:
        return received.layer_blocks["value_cache"][0].clone()  # type: ignore[no-any-return]


def put_bundle(to: Links, tensor: torch.Tensor, change: Change) -> torch.Tensor:
    name = to.name()
    bundle = KVCacheBundle(name, {"a": Data(name, {"x": tensor}), "b": _cache(name, like(tensor))})
    change()
    to.producer.put(bundle)
    with to.get(name) as received:
        return received.tensor_data["a"]["x"].clone()  # type: ignore[no-any-return]


def write_layer(to: Links, tensor: torch.Tensor, change: Change) -> torch.Tensor:
    name = to.name()
    dense = like(tensor)
    row, dtype = dense.shape[1:], dense.dtype
    plan = KVCacheTransferData.blank(name, row=row, dtype=dtype, metadata=_about(dense))
    with to.producer.stream_put(plan) as out:
        change()
        out.write_layer(0, dense, tensor)
    with to.get(name) as received:
        return received.layer_blocks["value_cache"][0].clone()  # type: ignore[no-any-return]


ANY: list[Way] = [put, put_again, put_many, append, allocate, save]
OF_CACHES: list[Way] = [put_cache, put_bundle, write_layer]
"""Ways of K and V, which have three dimensions and a dtype of `KV_DTYPES`."""


def ways_of(tensor: torch.Tensor) -> list[Way]:
    is_cache = tensor.dim() == 3 and tensor.numel() and str(tensor.dtype)[6:] in KV_DTYPES
    if is_cache:
        return ANY + OF_CACHES
    return ANY if tensor.dim() else [each for each in ANY if each is not append]


def torch_dtypes() -> list[torch.dtype]:
    """Every dtype that torch has."""
    return sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


SENT = {getattr(torch, name) for name in DTYPES}


def values(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Dense random bytes of a dtype; 0 and 1 of bool."""
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x[:120].view(5, 4, 6),
    "behind an offset": lambda x: x[17:137].view(5, 4, 6),
    "at the end of its storage": lambda x: x[-120:].view(5, 4, 6),
    "transposed": lambda x: x[:120].view(6, 4, 5).transpose(0, 2),
    "every second": lambda x: x[:240:2].view(5, 4, 6),
    "expanded": lambda x: x[:6].expand(5, 4, 6),
    "stride 0 alone": lambda x: x[3].expand(5, 4, 6),
    "overlapping": lambda x: x.as_strided((5, 4, 6), (2, 3, 1), 4),
    "five dimensions with gaps": lambda x: x[:240].view(2, 3, 4, 5, 2)[:, :2, :3, :4, :1],
    "six dimensions, permuted": lambda x: x[:240].view(2, 3, 2, 5, 2, 2).permute(5, 3, 1, 0, 2, 4),
    "sides of one, any strides": lambda x: x.as_strided((1, 6, 1), (99, 1, 7), 2),
    "without elements": lambda x: x[:0].view(0, 4, 6),
    "without dimensions": lambda x: x[7],
}


class Subclass(torch.Tensor):
    """A class of a user's, with torch's own functions."""


class Replacing(torch.Tensor):
    """A class that replaces all of torch's functions."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no function of torch here")


def inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def negated(x: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(x)


def of_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x).conj().imag


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "of a subclass": lambda x: x.as_subclass(Subclass),
    "of a class that replaces torch's functions": lambda x: x.as_subclass(Replacing),
    "of inference mode": inference,
    "copy-on-write": torch._lazy_clone,
    "in shared memory": lambda x: x.clone().share_memory_(),
    "a view of a view": lambda x: x.view(-1)[1:].view(-1)[1:],
}
"""Tensors that are sent whatever their dtype."""
FLOATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "that requires a gradient": lambda x: x.detach().requires_grad_(),
    "of a graph": lambda x: x.detach().requires_grad_().view(-1) * 1,
    "imaginary": of_complex,
}
MAYBE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": negated,
    "a zero tensor": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "on meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.view(-1, x.shape[-1]).to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x.view(-1), x.view(-1)[:3]]),
    "jagged": lambda x: torch.nested.nested_tensor(
        [x.view(-1), x.view(-1)[:3]], layout=torch.jagged
    ),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    "of oneDNN": lambda x: x.to_mkldnn(),
    "two tensors": lambda x: TwoTensor(x, x.clone()),
    "masked": lambda x: torch.masked.masked_tensor(x, x == x),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "uninitialized": lambda x: torch.nn.parameter.UninitializedParameter(dtype=x.dtype),  # type: ignore[call-arg]
    "functional": lambda x: torch._to_functional_tensor(x),
}
"""Tensors, where torch makes them, that are sent with the values that torch reads, or refused."""
