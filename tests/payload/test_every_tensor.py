"""Every tensor that torch makes, on every way: the bytes that torch reads, or a named refusal."""

from __future__ import annotations

import collections
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from omni_kvlink import SchemaError
from omni_kvlink.payload.views import same_bytes
from support.payloads.strategies import EXAMPLES
from support.payloads.tensor_ways import (
    ANY,
    FLOATS,
    MAYBE,
    OF_CACHES,
    PLAIN,
    SENT,
    VIEWS,
    Links,
    links,
    torch_dtypes,
    values,
    ways_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.payloads.tensor_ways import Way

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
KINDS = {"native, inline": ("native", 1 << 15), "native": ("native", 0), "torch": ("torch", 0)}
DTYPES = torch_dtypes()
COUNT = 260
SEEN = collections.Counter[str]()


@pytest.fixture(scope="module", params=KINDS)
def to(request: pytest.FixtureRequest) -> Iterator[Links]:
    copier, inline = KINDS[request.param]
    name = f"every-{list(KINDS).index(request.param)}"
    with (
        tempfile.TemporaryDirectory() as directory,
        links(Path(directory), name, copier, inline) as opened,
    ):
        yield opened


@pytest.fixture(scope="module", autouse=True)
def counted() -> Iterator[None]:
    """Print how many tensors were sent, and how many refused, over all dtypes, views and ways."""
    SEEN.clear()
    yield
    print(f"\n{SEEN.total()} tensors on {len(ANY + OF_CACHES)} ways: {dict(SEEN)}")


def unchanged() -> None:
    pass


def read_by_torch(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage is copied at the first write."""
    try:
        # torch has no public name for it.
        return torch._C._is_cow_tensor(tensor)  # type: ignore[attr-defined, no-any-return]
    except RuntimeError:  # it has no storage
        return False


def outcome(to: Links, send: Way, tensor: torch.Tensor, *, must: bool) -> str:
    """Whether a way of sending sent a tensor or refused it; an error if it did anything else."""
    was_shared = is_shared(tensor)
    try:
        received = send(to, tensor, unchanged)
    except SchemaError as error:
        if must or not any(word in str(error) for word in ("tensor", "layer")):
            raise
        SEEN["refused"] += 1
        return "refused"
    expected = read_by_torch(tensor)
    assert received.dtype == expected.dtype
    assert same_bytes(received, expected), send.__name__
    assert is_shared(tensor) == was_shared, f"{send.__name__} copied what a clone shares"
    SEEN["sent"] += 1
    return "sent"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_every_dtype(to: Links, dtype: torch.dtype) -> None:
    seen = collections.Counter[str]()
    if dtype not in SENT:
        whole = torch.empty(4, dtype=torch.uint8).view(torch.uint8)
        try:
            whole = torch.empty((4, 2, 2), dtype=dtype)
        except (RuntimeError, NotImplementedError):
            pytest.skip(f"torch makes no tensor of {dtype}")
        assert whole.dtype is dtype
        for send in ways_of(whole):
            with pytest.raises(SchemaError, match=f"dtype {dtype} cannot be sent"):
                send(to, whole, unchanged)
        return
    for view in VIEWS.values():
        tensor = view(values(dtype, COUNT))
        for send in ways_of(tensor):
            seen[outcome(to, send, tensor, must=True)] += 1
    print(dtype, dict(seen))


@pytest.mark.parametrize("dtype", sorted(SENT, key=str), ids=str)
def test_wrappers_of_every_dtype(to: Links, dtype: torch.dtype) -> None:
    seen = collections.Counter[str]()
    floats = FLOATS if dtype.is_floating_point else {}
    for name, make in {**PLAIN, **floats, **MAYBE}.items():
        source = values(dtype, 120).view(5, 4, 6)
        try:
            tensor = make(source)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            assert name not in PLAIN, name
            continue
        with torch._C.DisableTorchFunctionSubclass():
            sends = ways_of(source if name in MAYBE else tensor)
        for send in sends:
            seen[outcome(to, send, tensor, must=name not in MAYBE)] += 1
    print(dtype, dict(seen))
    assert seen["sent"] > 0 < seen["refused"]


def inside(transform: Callable[..., object], to: Links) -> None:
    """Send a value of a transformation of torch.func."""
    calls = list[str]()

    def function(x: torch.Tensor) -> torch.Tensor:
        for send in ways_of(x):
            calls.append(outcome(to, send, x * 2, must=False))
        return x.sum()

    transform(function)
    assert set(calls) == {"refused"}


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f)(torch.ones(5, 4, 6)),
    "vmap": lambda f: torch.vmap(f)(torch.ones(2, 5, 4, 6)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(5, 4, 6),), (torch.ones(5, 4, 6),)),
    "functionalize": lambda f: torch.func.functionalize(f)(torch.ones(5, 4, 6)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values_inside_torch_func(to: Links, transform: str) -> None:
    inside(TRANSFORMS[transform], to)


DISTRIBUTED: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "DTensor": (
        r"\.to_local\(\)",
        lambda x: DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()]),
        lambda x: x.to_local(),
    ),
    "AsyncCollectiveTensor": (
        r"\.wait\(\)",
        lambda x: all_reduce(x, "sum", [0]),
        lambda x: x.wait(),
    ),
}
"""The word of the cure, what makes such a tensor, and what the cure does."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    method = f"file://{tmp_path}/group"
    torch.distributed.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_tensors_of_torch_distributed(to: Links, kind: str) -> None:
    """Refused with the name of the method that gives the values, which are then sent."""
    cure, make, apply = DISTRIBUTED[kind]
    for send in ANY + OF_CACHES:
        plain = torch.rand(5, 4, 6)
        wrapped = make(plain)
        assert type(wrapped).__name__ == kind
        with pytest.raises(SchemaError, match=f"it is a {kind}.*{cure}"):
            send(to, wrapped, unchanged)
        SEEN["refused"] += 1
        assert outcome(to, send, apply(wrapped), must=True) == "sent"


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """A strided tensor, the bytes that it needs, and those that its storage is cut to."""
    dtype = draw(st.sampled_from(sorted(SENT, key=str)))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 9))
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    needed = offset + 1 + reach if 0 not in shape else 0
    whole = values(dtype, max(needed, offset) + draw(st.integers(0, 3)))
    tensor = whole.as_strided(shape, strides, offset)
    nbytes = whole.nbytes
    left = draw(st.just(nbytes) | st.integers(0, nbytes))
    return tensor, needed * dtype.itemsize, left


@settings(max_examples=150 * EXAMPLES)
@given(case=cases(), pick=st.integers(0, 99))
def test_a_view_is_sent_whole_or_refused(
    to: Links, case: tuple[torch.Tensor, int, int], pick: int
) -> None:
    """Whatever its strides, and however its storage is cut between the making and the put."""
    tensor, needed, left = case
    sends = ways_of(tensor)
    send = sends[pick % len(sends)]
    expected = read_by_torch(tensor)

    def cut() -> None:
        tensor.untyped_storage().resize_(left)

    if needed <= left:
        assert same_bytes(send(to, tensor, cut), expected)
    else:
        with pytest.raises(SchemaError, match=r"storage was (cut|freed)"):
            send(to, tensor, cut)
