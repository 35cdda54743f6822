"""The HiCache backend with SGLang's own host pools: equal pages, or a counted miss."""

from __future__ import annotations

import itertools
import random
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("sglang", reason="make test-sglang installs SGLang")

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.storage import StorageBackendFactory

from omni_kvlink import SchemaError
from omni_kvlink.integrations.sglang import KVLinkHiCache
from omni_kvlink.testing.rig import until
from support.doc_blocks import blocks
from support.kept.kept_bytes import flip_kept
from support.sglang.pools import (
    fill,
    mamba_pool,
    mha_pool,
    mla_pool,
    page_bytes,
    slots,
    storage_config,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_numbers = itertools.count()


@pytest.fixture
def hicache(sockets: str) -> Iterator[Callable[..., KVLinkHiCache]]:
    """`hicache(pool, …)`: the backend that SGLang makes, with a pool of K and V."""
    opened: list[KVLinkHiCache] = []

    def make(pool: Any, *extra: tuple[str, Any], serve: str = "", **changes: Any) -> KVLinkHiCache:
        own = {"options": {"directory": sockets}, **changes.pop("kvlink", {})}
        serve = serve or f"shm://hicache-{next(_numbers)}"
        config = storage_config(serve, kvlink=own, **changes)
        backend: KVLinkHiCache = StorageBackendFactory.create_backend("dynamic", config, pool)
        opened.append(backend)
        backend.register_mem_pool_host(pool)
        for name, one in (("kv", pool), *extra) if extra else ():
            backend.register_mem_host_pool_v2(one, PoolName(name))
        backend.on_host_pools_registered()
        return backend

    yield make
    for backend in reversed(opened):
        backend.close()


def url_of(backend: KVLinkHiCache) -> str:
    return str(backend.counters()["link"]["url"])


def reading(hicache: Callable[..., KVLinkHiCache], of: str, *args: Any, **options: Any) -> Any:
    """A backend of another engine that reads the link `of`, and is connected to it."""
    settings = {"peers": [of], **options.pop("kvlink", {})}
    backend = hicache(*args, kvlink=settings, **options)
    is_reached = lambda: all(one["reachable"] for one in backend.counters()["sources"])  # noqa: E731
    until(is_reached, "the other engine is reached", 60)
    return backend


def misses(backend: KVLinkHiCache) -> dict[str, int]:
    return {reason: number for reason, number in backend.counters()["misses"].items() if number}


def keys_of(pages: int) -> list[str]:
    return [f"{page:064x}" for page in range(pages)]


def transfer(name: PoolName, pool: Any, pages: list[int], keys: list[str]) -> PoolTransfer:
    return PoolTransfer(name=name, host_indices=slots(pool, pages), keys=keys)


POOLS = {
    "mha page_first": lambda: mha_pool(1001),
    "mha layer_first": lambda: mha_pool(1001, layout="layer_first"),
    "mha page_first_direct": lambda: mha_pool(1001, layout="page_first_direct"),
    "mha page_head": lambda: mha_pool(1001, layout="page_head"),
    "mha, V narrower than K": lambda: mha_pool(1001, v_head_dim=4),
    "mla page_first": lambda: mla_pool(1001),
    "mla layer_first": lambda: mla_pool(1001, layout="layer_first"),
    "mla page_first_direct": lambda: mla_pool(1001, layout="page_first_direct"),
}


@pytest.mark.parametrize("kind", POOLS)
def test_a_thousand_pages_come_back_equal(hicache: Callable[..., KVLinkHiCache], kind: str) -> None:
    """Into other pages of another engine's pool, whose other bytes stay as they are."""
    stored, loaded, keys = POOLS[kind](), POOLS[kind](), keys_of(1000)
    fill(stored, 1)
    fill(loaded, 2)
    is_mla = kind.startswith("mla")
    writer = hicache(stored, is_mla_model=is_mla)
    reader = reading(hicache, url_of(writer), loaded, is_mla_model=is_mla)
    order = random.Random(3).sample(range(1001), 1000)
    spare = (set(range(1001)) - set(order)).pop()
    before = page_bytes(loaded, spare)
    for at in range(0, 1000, 125):
        part, pages = keys[at : at + 125], list(range(at, at + 125))
        assert writer.batch_set_v1(part, slots(stored, pages)) == [True] * 125
        assert reader.batch_exists([*part, "f" * 64]) == 125
        assert reader.batch_get_v1(part, slots(loaded, order[at : at + 125])) == [True] * 125
    assert all(page_bytes(stored, n) == page_bytes(loaded, at) for n, at in enumerate(order))
    assert page_bytes(loaded, spare) == before
    assert reader.batch_get_v1(["f" * 64], slots(loaded, [0])) == [False]
    assert misses(reader) == {"absent": 1}


@pytest.mark.parametrize("side_states", [False, True], ids=["states", "states of several types"])
def test_a_thousand_pages_of_a_hybrid_model(
    hicache: Callable[..., KVLinkHiCache], side_states: bool
) -> None:
    """K and V with recurrent states, whose pages are slots of several tensors."""
    keys, ends = keys_of(1000), []
    for seed in (1, 2):
        pools = mha_pool(1001), mamba_pool(1001, side_states=side_states)
        for pool in pools:
            fill(pool, seed)
        ends.append(pools)
    (kv, states), (kv_into, states_into) = ends
    writer = hicache(kv, ("mamba", states))
    reader = reading(hicache, url_of(writer), kv_into, ("mamba", states_into))
    order = random.Random(3).sample(range(1001), 1000)
    for at in range(0, 1000, 125):
        part, pages = keys[at : at + 125], list(range(at, at + 125))
        transfers = [
            transfer(PoolName.KV, kv, pages, part),
            transfer(PoolName.MAMBA, states, pages, part),
        ]
        found = writer.batch_set_v2(transfers)
        assert found == {"kv": [True] * 125, "mamba": [True] * 125}
        into = order[at : at + 125]
        transfers = [
            transfer(PoolName.KV, kv_into, into, part),
            transfer(PoolName.MAMBA, states_into, into, part),
        ]
        assert reader.batch_get_v2(transfers) == found
    for number, at in enumerate(order):
        assert page_bytes(kv, number) == page_bytes(kv_into, at)
        assert page_bytes(states, number) == page_bytes(states_into, at)
    assert misses(reader) == {}


def test_flat_pages_are_the_same_pages(hicache: Callable[..., KVLinkHiCache]) -> None:
    """Without `interface_v1`, SGLang passes flat pages."""
    pool, keys = mha_pool(4, layout="layer_first"), keys_of(3)
    fill(pool, 1)
    backend = hicache(pool)
    assert backend.batch_set(keys[:2], [pool.get_data_page(4 * n) for n in range(2)])
    assert backend.batch_set_v1(keys[2:], slots(pool, [2])) == [True]
    into = [pool.get_dummy_flat_data_page() for _ in range(4)]
    found = backend.batch_get([*keys, "f" * 64], into)
    assert [one is not None for one in found] == [True, True, True, False]
    assert all(
        bytes(one.view(torch.uint8).numpy()) == page_bytes(pool, n)
        for n, one in enumerate(into[:3])
    )
    assert backend.batch_get_v1(keys[:1], slots(pool, [3])) == [True]
    assert page_bytes(pool, 3) == page_bytes(pool, 0)
    assert (backend.exists(keys[0]), backend.exists("f" * 64)) == (True, False)


OTHERS: dict[str, dict[str, Any]] = {
    "weights": {"kvlink": {"revision": "v2"}},
    "dtype's name": {"kvlink": {"dtype": "fp8_e4m3"}},
    "model": {"model_name": "llama-3"},
    "salt": {"kvlink": {"salt": "tenant"}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_identity_is_a_miss(hicache: Callable[..., KVLinkHiCache], other: str) -> None:
    stored, loaded = mha_pool(2), mha_pool(2)
    fill(stored, 1)
    writer = hicache(stored)
    reader = reading(hicache, url_of(writer), loaded, **OTHERS[other])
    assert writer.batch_set_v1(keys_of(1), slots(stored, [0])) == [True]
    assert reader.batch_exists(keys_of(1)) == 0
    assert reader.batch_get_v1(keys_of(1), slots(loaded, [0])) == [False]
    assert not loaded.kv_buffer.any()
    assert misses(reader) == {"other_identity": 1}


SHAPES: dict[str, dict[str, Any]] = {
    "layout": {"layout": "page_first_direct"},
    "dtype": {"dtype": torch.float16},
    "heads": {"heads": 1},
    "layers": {"layers": 2},
}


@pytest.mark.parametrize("other", SHAPES)
def test_pools_of_another_layout_share_nothing(
    hicache: Callable[..., KVLinkHiCache], other: str
) -> None:
    """Also where the number of bytes is the same."""
    stored, loaded = mha_pool(2), mha_pool(2, **SHAPES[other])
    fill(stored, 1)
    writer = hicache(stored)
    reader = reading(hicache, url_of(writer), loaded)
    assert writer.batch_set_v1(keys_of(1), slots(stored, [0])) == [True]
    assert reader.batch_get_v1(keys_of(1), slots(loaded, [0])) == [False]
    assert not loaded.kv_buffer.any()
    assert misses(reader) == {"other_identity": 1}


def test_a_flipped_bit_is_a_miss(hicache: Callable[..., KVLinkHiCache], sockets: str) -> None:
    pool, keys = mha_pool(4), keys_of(2)
    fill(pool, 1)
    backend = hicache(pool, kvlink={"options": {"directory": sockets, "inline": 0}})
    backend.batch_set_v1(keys, slots(pool, [0, 1]))
    assert flip_kept(page_bytes(pool, 0)[:32]) == 1
    assert backend.batch_get_v1(keys, slots(pool, [2, 3])) == [False, True]
    assert page_bytes(pool, 3) == page_bytes(pool, 1)
    assert misses(backend) == {"damaged": 1}


def test_too_few_slots_move_nothing(hicache: Callable[..., KVLinkHiCache]) -> None:
    pool, keys = mha_pool(4), keys_of(2)
    fill(pool, 1)
    before = [page_bytes(pool, page) for page in range(4)]
    backend = hicache(pool, ("mamba", mamba_pool(3)))
    short = PoolTransfer(name=PoolName.KV, host_indices=slots(pool, [0]), keys=keys)
    assert backend.batch_set_v2([short]) == {"kv": [False, False]}
    assert backend.batch_exists(keys) == 0
    backend.batch_set_v1(keys, slots(pool, [0, 1]))
    assert backend.batch_get_v2([short]) == {"kv": [False, False]}
    assert [page_bytes(pool, page) for page in range(4)] == before


def test_existing_prefixes_are_those_of_sglangs_own_backend(
    hicache: Callable[..., KVLinkHiCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random pages of three pools are stored in both, then requested for with each policy."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    choose, pools = random.Random(7), (mha_pool(9), mha_pool(9), mamba_pool(10))
    names = (PoolName.KV, PoolName.DRAFT, PoolName.MAMBA)
    for seed, pool in enumerate(pools):
        fill(pool, seed)
    ours = hicache(pools[0], *zip(("draft", "mamba"), pools[1:], strict=True))
    theirs = HiCacheFile(storage_config("shm://none"))
    for name, pool in zip(names, pools, strict=True):
        theirs.register_mem_host_pool_v2(pool, name)
    for trial in range(60):
        keys = [f"{trial:032x}{page:032x}" for page in range(8)]
        for name, pool in zip(names, pools, strict=True):
            pages = [page for page in range(8) if choose.random() < 0.85]
            part = [transfer(name, pool, pages, [keys[page] for page in pages])]
            assert ours.batch_set_v2(part) == theirs.batch_set_v2(part)
        requested = [
            PoolTransfer(name=PoolName.DRAFT, hit_policy=PoolHitPolicy.ALL_PAGES),
            PoolTransfer(
                name=PoolName.MAMBA,
                keys=keys[: choose.randrange(4)],
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            ),
        ]
        requested = choose.sample(requested, choose.randrange(3))
        found, expected = (one.batch_exists_v2(keys, requested) for one in (ours, theirs))
        assert found.kv_hit_pages == expected.kv_hit_pages
        if expected.restorable_prefix_pages:
            assert found == expected


def test_ranks_have_links_and_pages_of_their_own(hicache: Callable[..., KVLinkHiCache]) -> None:
    """Of a sharded pool; the replicated one of an MLA model is written by its first rank."""
    pools = [mha_pool(2) for _ in range(2)]
    serve = f"shm://ranks-{next(_numbers)}-{{rank}}"
    first, second = (
        hicache(pool, serve=serve, tp_rank=rank, tp_size=2, kvlink={"peers": [serve]})
        for rank, pool in enumerate(pools)
    )
    assert url_of(first) != url_of(second)
    assert first.batch_set_v1(keys_of(1), slots(pools[0], [0])) == [True]
    assert second.batch_exists(keys_of(1)) == 0

    serve = f"shm://ranks-{next(_numbers)}-{{rank}}"
    latent = [mla_pool(2) for _ in range(2)]
    fill(latent[0], 1)
    parts = {"tp_size": 2, "is_mla_model": True, "serve": serve}
    writer = hicache(latent[0], tp_rank=0, **parts)
    reader = hicache(latent[1], tp_rank=1, **parts)
    is_reached = lambda: all(one["reachable"] for one in reader.counters()["sources"])  # noqa: E731
    until(is_reached, "the rank that writes is reached", 60)
    assert writer.batch_set_v1(keys_of(1), slots(latent[0], [0])) == [True]
    assert reader.batch_get_v1(keys_of(1), slots(latent[1], [1])) == [True]
    assert page_bytes(latent[1], 1) == page_bytes(latent[0], 0)


def test_states_of_an_mla_model_are_each_ranks_own(
    hicache: Callable[..., KVLinkHiCache],
) -> None:
    """And so are K and V of a draft model: SGLang's first rank writes them, for itself."""
    serve, ends = f"shm://ranks-{next(_numbers)}-{{rank}}", []
    for rank in range(2):
        pools = mla_pool(2), mamba_pool(3), mha_pool(2)
        extra = ("mamba", pools[1]), ("draft", pools[2])
        parts = {"tp_rank": rank, "tp_size": 2, "is_mla_model": True, "serve": serve}
        ends.append((hicache(pools[0], *extra, **parts), pools))
    (writer, pools), (reader, _) = ends
    is_reached = lambda: all(one["reachable"] for one in reader.counters()["sources"])  # noqa: E731
    until(is_reached, "the rank that writes is reached", 60)
    names = (PoolName.KV, PoolName.MAMBA, PoolName.DRAFT)
    writer.batch_set_v2(
        [transfer(name, pool, [0], keys_of(1)) for name, pool in zip(names, pools, strict=True)]
    )
    requested = [PoolTransfer(name=name) for name in names[1:]]
    assert reader.batch_exists_v2(keys_of(1), requested).extra_pool_hit_pages == {"kv": 1}
    found = writer.batch_exists_v2(keys_of(1), requested).extra_pool_hit_pages
    assert found == {"kv": 1, "mamba": 1, "draft": 1}


def test_clearing_withdraws_what_was_stored(
    hicache: Callable[..., KVLinkHiCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of evicted pages are forgotten meanwhile."""
    from omni_kvlink.integrations.sglang import backend as module

    monkeypatch.setattr(module, "PRUNE_FROM", 16)
    pool = mha_pool(4)
    fill(pool, 1)
    backend = hicache(pool, kvlink={"budget": "128KiB"})
    keys = keys_of(300)
    for key in keys:
        assert backend.batch_set_v1([key], slots(pool, [0])) == [True]
    kept = backend.counters()["link"]["transfers"]["kept"]
    assert 0 < kept < 300
    backend.clear()
    assert backend.counters()["link"]["transfers"]["kept"] == 0
    assert backend.batch_exists(keys[-1:]) == 0


def test_a_logical_pool_has_pages_without_bytes(hicache: Callable[..., KVLinkHiCache]) -> None:
    """Of models whose K and V lie in side pools alone."""
    pool = LogicalHostPool(8, 4)
    backend = hicache(pool, is_mla_model=True)
    assert backend.batch_set_v1(keys_of(2), slots(pool, [0, 1])) == [True, True]
    assert backend.batch_exists([*keys_of(2), "f" * 64]) == 2
    assert backend.batch_get_v1(keys_of(2), slots(pool, [0, 1])) == [True, True]


def test_settings_that_are_missing_or_wrong(hicache: Callable[..., KVLinkHiCache]) -> None:
    pool = mha_pool(2)
    with pytest.raises(SchemaError, match=r"kvlink\.revision=''"):
        hicache(pool, kvlink={"revision": ""})
    with pytest.raises(SchemaError, match=r"write \{rank\} into its URL"):
        hicache(pool, tp_size=2)
    with pytest.raises(SchemaError, match="has not named the model"):
        hicache(pool, model_name=None)
    with pytest.raises(SchemaError, match="kvlink is missing in the extra configuration"):
        hicache(pool, extra_config={**storage_config("shm://a").extra_config, "kvlink": None})
    with pytest.raises(SchemaError, match=r"kvlink\.dtype is missing"):
        hicache(mha_pool(2, dtype=torch.uint8))
    hicache(mha_pool(2, dtype=torch.uint8), kvlink={"dtype": "fp8_e4m3"})
    with pytest.raises(SchemaError, match=r"page_unified.*--hicache-mem-layout page_first"):
        hicache(mha_pool(2, layout="page_unified"))


def test_sglang_makes_it_from_the_configuration_of_the_guide(sockets: str) -> None:
    """By its parser, its factory and its server's arguments."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    [text] = [one.text for one in blocks("docs/guides/hicache.md") if "launch_server" in one.first]
    argv = shlex.split(text)
    assert argv[argv.index("--hicache-storage-backend") + 1] == "dynamic"
    given = argv[argv.index("--hicache-storage-backend-extra-config") + 1]
    extra = HybridCacheController.parse_storage_backend_extra_config(given)[0]
    extra["kvlink"]["options"] = {"directory": sockets}
    extra["kvlink"]["budget"] = "64MiB"
    config = storage_config("", extra_config=extra)
    backend = StorageBackendFactory.create_backend("dynamic", config, None)
    assert isinstance(backend, KVLinkHiCache)
    assert url_of(backend) == "shm://engine-a-0"
    assert [one["url"] for one in backend.counters()["sources"]] == ["shm://engine-b-0"]
    backend.close()
