"""The transport's calls, as Ray makes them, in one process: bytes, quota, errors, settings."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    CapacityError,
    IntegrityError,
    PeerLostError,
    SchemaError,
    TransferFailed,
)

pytest.importorskip("ray.experimental", reason="needs `pip install 'omni-kvlink[ray]'`")

import omni_kvlink.integrations.ray
from omni_kvlink.integrations.ray.settings import RaySettings
from omni_kvlink.integrations.ray.transport import KVLinkTransport
from omni_kvlink.testing.rig import until
from support.kept.kept_bytes import flip_kept
from support.ray.tensors import digest, many_kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.integrations.ray.transport import KVLinkMetadata

KEY, OTHER = "ab" * 28, "cd" * 28
LOOPBACK = "127.0.0.1"


@pytest.fixture
def make(sockets: str) -> Iterator[Callable[..., KVLinkTransport]]:
    """A function that makes a process's transport, as `register` configures it."""
    made = list[KVLinkTransport]()

    def make_one(transport: Any = "shm", host: str = "", **values: Any) -> KVLinkTransport:
        names = "views", "put_timeout", "connect_timeout"
        own = {name: values.pop(name) for name in names if name in values}
        options = {"directory": sockets, **values}
        settings = RaySettings(transport, host, options=options, **{"connect_timeout": 60.0, **own})
        configured = type("Configured", (KVLinkTransport,), {"settings": settings})
        made.append(configured())
        return made[-1]

    yield make_one
    for each in made:
        each.links.close()


def put(source: KVLinkTransport, tensors: list[torch.Tensor], key: str = KEY) -> KVLinkMetadata:
    return source.extract_tensor_transport_metadata(key, tensors)


def get(reader: KVLinkTransport, about: KVLinkMetadata, key: str = KEY) -> list[torch.Tensor]:
    return reader.recv_multiple_tensors(key, about, reader.get_communicator_metadata(None, None))


def counters(source: KVLinkTransport) -> dict[str, Any]:
    found = source.links.stats()["producers"][0]
    return {**found["transfers"], "used": found["memory"]["used"]}


@pytest.mark.parametrize(
    ("transport", "host"),
    [("shm", ""), ("auto", LOOPBACK), ("zmq+tcp", LOOPBACK)],
    ids=["shm", "auto", "zmq+tcp"],
)
def test_any_number_of_readers_get_the_same_bytes(
    make: Callable[..., KVLinkTransport], transport: str, host: str
) -> None:
    source, tensors = make(transport, host), many_kinds()
    about = put(source, tensors)
    assert [each[1] for each in about.tensor_meta] == [tensor.dtype for tensor in tensors]
    for _ in range(3):
        reader = make(transport, host)
        for _ in range(2):
            got = get(reader, about)
            assert digest(got) == digest(tensors)
            got[0].fill_(0)  # its own memory: no other reader sees it
    assert counters(source)["kept"] == 1
    source.garbage_collect(KEY, about, tensors)
    assert counters(source)["kept"] == 0
    until(lambda: counters(source)["used"] == 0, "the readers have released it")
    with pytest.raises(TransferFailed, match="withdrew"):
        get(reader, about)


def test_a_repeated_task_keeps_the_tensors_of_the_first(
    make: Callable[..., KVLinkTransport],
) -> None:
    source, reader = make(), make()
    put(source, [torch.ones(3)])
    about = put(source, [torch.ones(3)])
    assert counters(source)["kept"] == 1
    assert get(reader, about)[0].sum() == 3
    source.garbage_collect(KEY, about, [])
    until(lambda: counters(source)["used"] == 0, "its reader has released it")


def test_an_object_without_tensors_needs_no_link(make: Callable[..., KVLinkTransport]) -> None:
    source = make()
    about = put(source, [])
    assert get(source, about) == []
    source.garbage_collect(KEY, about, [])
    assert source.links.stats() == {"producers": [], "consumers": []}


def test_tensors_are_copied_into_buffers_of_the_caller(
    make: Callable[..., KVLinkTransport],
) -> None:
    source, reader = make(), make()
    about = put(source, [torch.arange(6.0).reshape(2, 3), torch.ones(4)])
    buffers = [torch.zeros(2, 3), torch.zeros(4)]
    nothing = reader.get_communicator_metadata(None, None)
    got = reader.recv_multiple_tensors(KEY, about, nothing, buffers)
    assert [tensor.data_ptr() for tensor in got] == [tensor.data_ptr() for tensor in buffers]
    assert [float(tensor.sum()) for tensor in buffers] == [15, 4]


def test_views_are_of_the_memory_of_the_link(make: Callable[..., KVLinkTransport]) -> None:
    source, reader = make(), make(views=True)
    about = put(source, [torch.arange(1 << 16)])
    (view,) = get(reader, about)
    assert view.sum() == sum(range(1 << 16))
    source.garbage_collect(KEY, about, [])
    assert counters(source)["used"] > 0
    assert view[-1] == (1 << 16) - 1
    del view
    until(lambda: counters(source)["used"] == 0, "its reader has released it")


def test_an_object_with_references_is_not_evicted(make: Callable[..., KVLinkTransport]) -> None:
    """A put beyond the quota waits until others are collected, then says what to do."""
    source, reader = make(quota="2MB", put_timeout=0.05), make()
    first = put(source, [torch.full((1_200_000,), 7, dtype=torch.uint8)])
    with pytest.raises(CapacityError, match=r"drop references, or raise quota= of register\(\)"):
        put(source, [torch.ones(1_200_000, dtype=torch.uint8)], OTHER)
    assert get(reader, first)[0].sum() == 7 * 1_200_000
    assert counters(source)["evicted"] == 0
    source.garbage_collect(KEY, first, [])
    second = put(source, [torch.ones(1_200_000, dtype=torch.uint8)], OTHER)
    assert get(reader, second, OTHER)[0].sum() == 1_200_000


def test_a_put_waits_for_the_memory_of_collected_objects(
    make: Callable[..., KVLinkTransport],
) -> None:
    source = make(quota="2MB", put_timeout=600)
    first = put(source, [torch.ones(1_200_000, dtype=torch.uint8)])
    thread = threading.Thread(target=put, args=(source, [torch.ones(300_000)], OTHER))
    thread.start()
    source.garbage_collect(KEY, first, [])
    thread.join()
    assert counters(source)["kept"] == 1


def test_a_damaged_tensor_is_an_error(make: Callable[..., KVLinkTransport]) -> None:
    source, reader = make(), make()
    tensor = torch.arange(100_000)
    about = put(source, [tensor])
    assert flip_kept(tensor[1000:1010].numpy().tobytes()) == 1
    with pytest.raises(IntegrityError):
        get(reader, about)


def test_a_source_that_has_gone_is_named(make: Callable[..., KVLinkTransport]) -> None:
    source, reader, other = make(), make(connect_timeout=0.01), make(connect_timeout=0.01)
    about = put(source, [torch.ones(3)])
    get(reader, about)
    source.links.close()
    for each in (reader, other):
        with pytest.raises(PeerLostError, match=f"made object {KEY} is gone"):
            get(each, about)
        assert each.links.stats()["consumers"] == []


def test_an_aborted_transfer_raises(make: Callable[..., KVLinkTransport]) -> None:
    source, reader = make(), make()
    about = put(source, [torch.ones(3)])
    reader.abort_transport(KEY, reader.get_communicator_metadata(None, None))
    with pytest.raises(TransferFailed, match="Ray has aborted"):
        get(reader, about)
    other = put(source, [torch.ones(3)], OTHER)
    assert get(reader, other, OTHER)[0].sum() == 3
    assert reader.can_abort_transport()  # else Ray kills the source when a reader dies


def test_errors_keep_no_tensors(make: Callable[..., KVLinkTransport]) -> None:
    """Ray stores an error until its reader looks at it; its frames would hold the tensors."""
    source, reader = make(), make()
    about = put(source, [torch.ones(3)])
    source.garbage_collect(KEY, about, [])
    with pytest.raises(TransferFailed) as caught:
        get(reader, about)
    names = [entry.name for entry in caught.traceback]
    assert names[-1] == "recv_multiple_tensors", names
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.ones(2).to_sparse()])
def test_a_tensor_that_cannot_be_sent_is_named(
    make: Callable[..., KVLinkTransport], tensor: torch.Tensor
) -> None:
    with pytest.raises(SchemaError, match=r"tensor '?1'?"):
        put(make(), [torch.ones(2), tensor])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"transport": "inproc"}, "transport='inproc'"),
        ({"host": "10.0.0.5"}, "host='10.0.0.5'"),
        ({"timeout": 0}, "timeout=0"),
        ({"quotas": 3}, "quotas"),
        ({"tcp": "127.0.0.1:0"}, "tcp="),
        ({"device": "cuda:0"}, "device="),
    ],
)
def test_settings_are_checked_at_once(values: dict[str, Any], named: str) -> None:
    with pytest.raises(SchemaError, match=named):
        omni_kvlink.integrations.ray.register("kvlink-wrong", **values)


def test_registering_twice() -> None:
    """It is done in a module that actors import, too; other settings are an error."""
    for _ in range(2):
        omni_kvlink.integrations.ray.register("kvlink-twice", quota="1GB")
    with pytest.raises(SchemaError, match="registered already"):
        omni_kvlink.integrations.ray.register("kvlink-twice", quota="2GB")
