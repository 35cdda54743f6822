"""The L2 adapter with LMCache's own keys and memory objects: equal bytes, or a counted miss."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("lmcache.v1.distributed", reason="make test-lmcache installs LMCache")

from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

from omni_kvlink.connectors.protocol.messages import Release
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.integrations.lmcache import KVLinkL2Adapter
from omni_kvlink.testing.rig import until
from support.kept.kept_bytes import flip_kept
from support.lmcache.l2 import L2, NBYTES, chunk, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.connectors.protocol.messages import Message
    from omni_kvlink.connectors.protocol.transfer import Peer

_numbers = itertools.count()
PLUGIN = {"module_path": "omni_kvlink.integrations.lmcache", "class_name": "KVLinkL2Adapter"}


@pytest.fixture
def l2(sockets: str) -> Iterator[Callable[..., L2]]:
    """`l2(…)`: an adapter with a link of its own, or with the settings that are given."""
    opened: list[L2] = []

    def make(**params: Any) -> L2:
        options = {"directory": sockets, **params.pop("options", {})}
        url = params.pop("serve", f"shm://l2-{next(_numbers)}")
        opened.append(L2(url, options=options, **params))
        return opened[-1]

    yield make
    for one in reversed(opened):
        one.adapter.close()


def url_of(one: L2) -> str:
    return str(one.adapter.report_status()["url"])


def until_reached(one: L2) -> None:
    """Wait until an adapter has connected to all its stores and peers."""
    is_reached = lambda: all(s["reachable"] for s in one.adapter.report_status()["sources"])  # noqa: E731
    until(is_reached, "stores and peers are reached", 60)


def test_chunks_come_back_equal(l2: Callable[..., L2]) -> None:
    one, keys = l2(), [key_of(number) for number in range(40)]
    chunks = [chunk(number) for number in range(40)]
    assert one.store(keys, chunks).bytes_transferred() == 40 * NBYTES
    assert one.look_up([*keys, key_of(99)]) == list(range(40))
    into = [chunk() for _ in keys]
    assert one.load(keys, into) == list(range(40))
    for stored, loaded in zip(chunks, into, strict=True):
        assert torch.equal(stored.raw_data[:NBYTES], loaded.raw_data[:NBYTES])
        assert not loaded.raw_data[NBYTES:].any()  # what lies behind a chunk is another's
    assert one.load([key_of(99)], [chunk()]) == []
    assert one.misses == {"absent": 1}


def test_chunks_that_are_loaded_together_are_released_together(
    l2: Callable[..., L2], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one message: each would interrupt the copy of the next chunk."""
    one, keys, releases = l2(), [key_of(number) for number in range(8)], list[int]()
    other = l2(peers=[url_of(one)])
    until_reached(other)
    handle = PooledProducer.handle

    def count(producer: PooledProducer, peer: Peer, *messages: Message) -> None:
        if number := sum(isinstance(message, Release) for message in messages):
            releases.append(number)
        handle(producer, peer, *messages)

    monkeypatch.setattr(PooledProducer, "handle", count)
    one.store(keys, [chunk(number) for number in range(8)])
    assert other.load(keys, [chunk() for _ in keys]) == list(range(8))
    until(lambda: sum(releases) == 8, "all chunks are released", 60)
    assert releases == [8]


def test_another_engine_reads_them(l2: Callable[..., L2]) -> None:
    """Its own first, then the peer's; a chunk of both is one of its own."""
    one = l2()
    other = l2(peers=[url_of(one)])
    until_reached(other)
    one.store([key_of(1), key_of(2)], [chunk(1), chunk(2)])
    other.store([key_of(2)], [chunk(2)])
    into = [chunk(), chunk()]
    assert other.load([key_of(1), key_of(2)], into) == [0, 1]
    for number, loaded in enumerate(into, 1):
        assert torch.equal(loaded.raw_data, chunk(number).raw_data)
    assert other.adapter.report_status()["hits"] == {"here": 1, "stores": 0, "peers": 1}


@pytest.mark.parametrize(
    "other",
    [
        {"revision": "v2"},
        {"dtype": "fp8_e4m3"},
        {"rope": "yarn"},
        {"adapter": "sql@1"},
        {"salt": "tenant"},
        {"media": "a digest"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_weights_are_another_identity(l2: Callable[..., L2], other: dict[str, str]) -> None:
    """LMCache's keys name the model; they know nothing of these."""
    one = l2()
    reader = l2(peers=[url_of(one)], **other)
    until_reached(reader)
    one.store([key_of(1)], [chunk(1)])
    assert reader.look_up([key_of(1)]) == []
    into = chunk()
    assert reader.load([key_of(1)], [into]) == []
    assert not into.raw_data.any()
    assert reader.misses == {"other_identity": 1}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": "llama-3"}, "other_identity"),
        ({"salt": "tenant"}, "other_identity"),
        ({"rank": 1}, "absent"),
    ],
    ids=["model", "salt", "rank"],
)
def test_each_part_of_lmcaches_key_counts(
    l2: Callable[..., L2], other: dict[str, Any], reason: str
) -> None:
    one = l2()
    reader = l2(peers=[url_of(one)])
    until_reached(reader)
    one.store([key_of(1)], [chunk(1)])
    assert reader.load([key_of(1, **other)], [chunk()]) == []
    assert reader.misses == {reason: 1}
    assert reader.load([key_of(1)], [chunk()]) == [0]


@pytest.mark.parametrize(
    "into",
    [
        {"dtype": torch.float16},
        {"shape": (2, 3, 8, 4)},
        {"shape": (2, 3, 4, 4)},
        {"shape": (2, 3, 4, 16)},
    ],
    ids=["dtype", "shape", "shorter", "longer"],
)
def test_memory_of_another_layout_is_a_miss(l2: Callable[..., L2], into: dict[str, Any]) -> None:
    """Also where the number of bytes is the same; nothing is written."""
    one, target = l2(), chunk(**into)
    one.store([key_of(1), key_of(2)], [chunk(1), chunk(2)])
    good = chunk()
    assert one.load([key_of(1), key_of(2)], [target, good]) == [1]
    assert not target.raw_data.any()
    assert torch.equal(good.raw_data, chunk(2).raw_data)
    assert one.misses == {"layout": 1}


def test_a_flipped_bit_is_a_miss(l2: Callable[..., L2]) -> None:
    one = l2(options={"inline": 0})
    stored = [chunk(1), chunk(2)]
    one.store([key_of(1), key_of(2)], stored)
    pattern = bytes(stored[0].byte_array[:32])
    assert flip_kept(pattern) == 1
    assert one.load([key_of(1), key_of(2)], [chunk(), chunk()]) == [1]
    assert one.misses == {"damaged": 1}


def test_a_chunk_that_does_not_fit_fails_its_task_alone(l2: Callable[..., L2]) -> None:
    one, large = l2(budget="1MiB"), chunk(1, shape=(2, 1024, 1024))
    assert not one.store([key_of(1), key_of(2)], [large, chunk(2)]).is_successful()
    assert one.look_up([key_of(1), key_of(2)]) == [1]
    assert one.store([key_of(3)], [chunk(3)]).is_successful()


class Listener(L2AdapterListener):  # type: ignore[misc, unused-ignore]
    """What LMCache is told."""

    def __init__(self) -> None:
        self.stored: dict[Any, int] = {}
        self.accessed: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        assert not self.stored.keys() & set(keys)
        self.stored.update(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        for key in keys:
            del self.stored[key]


def test_lmcache_is_told_what_is_kept(l2: Callable[..., L2]) -> None:
    """What the budget has evicted is kept no more, and may be stored again."""
    one, listener = l2(budget="1MiB"), Listener()
    one.adapter.register_listener(listener)
    shape, keys = (2, 100, 1000), [key_of(number) for number in range(6)]
    for number, key in enumerate(keys):
        assert one.store([key], [chunk(number, shape=shape)]).is_successful()
    usage = one.adapter.get_usage()
    kept = one.look_up(keys)
    assert 0 < len(kept) < 6
    assert kept[-1] == 5  # the least recently used are evicted
    assert list(listener.stored) == [keys[number] for number in kept]
    assert usage.total_bytes_used == len(kept) * 400_000
    assert dict(usage.bytes_by_cache_salt) == {"": len(kept) * 400_000}
    assert one.store([keys[0]], [chunk(0, shape=shape)]).is_successful()
    assert one.load([keys[0]], [chunk(shape=shape)]) == [0]
    assert listener.accessed == [keys[0]]
    one.adapter.delete(keys)
    assert (listener.stored, one.look_up(keys)) == ({}, [])
    assert one.adapter.get_usage().total_bytes_used == 0


def test_lmcache_makes_it_from_its_configuration(sockets: str) -> None:
    params = {"serve": "shm://made", "revision": "main", "options": {"directory": sockets}}
    config = PluginL2AdapterConfig.from_dict({**PLUGIN, "adapter_params": params})
    adapter = create_l2_adapter(config)
    assert isinstance(adapter, KVLinkL2Adapter)
    descriptors = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(descriptors) == 3  # LMCache finds an adapter's tasks by them
    adapter.close()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"serve": "shm://a"}, "adapter_params.revision is missing"),
        ({"revision": "main"}, "adapter_params.serve is missing"),
        ({"serve": "shm://a", "revision": ""}, "revision=''"),
        ({"serve": "shm://a", "revision": "main", "peer": []}, "did you mean peers"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(params: dict[str, Any], text: str) -> None:
    config = PluginL2AdapterConfig.from_dict({**PLUGIN, "adapter_params": params})
    with pytest.raises(ValueError, match=text):
        create_l2_adapter(config)


def test_a_task_that_fails_has_a_result(l2: Callable[..., L2]) -> None:
    """LMCache would wait for it for ever."""
    one = l2()
    one.store([key_of(1)], [chunk(1)])
    assert one.load([key_of(1), key_of(1)], [chunk()]) == []  # a bit for each key
    assert not one.store([key_of(2), key_of(3)], [chunk(2)]).is_successful()
    assert one.load([key_of(1)], [chunk()]) == [0]
