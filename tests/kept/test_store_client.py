"""Clients, stores and peers: bit-equal, or a miss that is counted by its reason."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import warnings
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    CapacityError,
    ClosedError,
    KVLink,
    SchemaError,
    TensorTransferData,
    TransferFailed,
)
from omni_kvlink.kept import CacheIdentity, PayloadStore, StoreClient
from omni_kvlink.kept import offers as offers_module
from omni_kvlink.kept import source as source_module
from omni_kvlink.kept import store as store_module
from omni_kvlink.kept.offers import MAX_QUEUED
from omni_kvlink.kept.payload_directory import file_name
from omni_kvlink.kept.store_messages import Attachment
from omni_kvlink.testing.rig import until
from support.faults.frozen import freeze
from support.faults.leak_checks import zmq_started as zmq_started
from support.kept.store_process import (
    KEEPER,
    READER,
    kill_store,
    next_line,
    program,
    store_process,
    until_reachable,
)
from support.payloads.payload_files import flip
from support.payloads.small_payloads import MAKERS, tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from omni_kvlink import Payload, Received

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
_numbers = itertools.count()
URLS = [
    "shm://{name}",
    "zmq+ipc://{root}/{name}",
    "zmq+tcp://127.0.0.1:0",
    "auto://{name}?tcp=127.0.0.1:0",
]
BIG = {"x": torch.arange(300_000)}
"""Tensors of 2.4 MB."""


class Site:
    """Stores and clients of one directory of sockets, over one connector."""

    def __init__(self, url: str, root: str):
        self.url, self.root = url, root
        self.closing: list[Any] = []

    def new_url(self) -> str:
        return self.url.format(name=f"n{next(_numbers)}", root=self.root)

    def store(self, budget: int | str = "32MiB", **options: Any) -> PayloadStore:
        if "ipc" in self.url:
            options.setdefault("writers", [f"zmq+ipc://{self.root}/*"])
        url = options.pop("url", "") or self.new_url()
        store = PayloadStore(url, budget=budget, directory=self.root, **options)
        self.closing.append(store)
        return store

    def client(self, **options: Any) -> StoreClient:
        options = {"budget": "32MiB", "directory": self.root, "timeout": 60.0, **options}
        client = StoreClient(options.pop("url", "") or self.new_url(), **options)
        self.closing.append(client)
        return client

    def close(self) -> None:
        for one in reversed(self.closing):
            one.close()


@pytest.fixture
def site() -> Iterator[Site]:
    """Over shared memory; what killed processes leave is removed."""
    with tempfile.TemporaryDirectory(prefix="kvl-") as root:
        site = Site(URLS[0], root)
        yield site
        site.close()


@pytest.fixture(params=URLS, ids=["shm", "ipc", "tcp", "auto"])
def sites(request: pytest.FixtureRequest, sockets: str) -> Iterator[Site]:
    """Over each connector."""
    site = Site(request.param, sockets)
    yield site
    site.close()


def difference(received: Received | None, data: Payload) -> str:
    """Where a payload that was received differs; "missed" if there is none."""
    return "missed" if received is None else received.data.difference(data)  # type: ignore[arg-type]


def misses(client: StoreClient) -> dict[str, int]:
    """The misses by reason, without zeros."""
    return {reason: count for reason, count in client.stats()["misses"].items() if count}


def numbers_of(client: StoreClient, keys: Sequence[str]) -> list[int | None]:
    """The first element of each payload of `filled`; None for a miss."""
    found: list[int | None] = []
    for received in client.get_many(keys):
        if received is None:
            found.append(None)
            continue
        target = torch.empty_like(BIG["x"])
        received.scatter([target])
        assert (target == target[0]).all()
        found.append(int(target[0]))
        received.release()
    return found


def refused_client(site: Site, **options: Any) -> StoreClient:
    client = site.client(**options)
    until(lambda: client.stats()["sources"][0]["last_error"], "it is refused")
    return client


def fill(client: StoreClient, numbers: range) -> list[str]:
    keys = [f"k{number}" for number in numbers]
    for key, number in zip(keys, numbers, strict=True):
        assert client.put(key, {"x": torch.full_like(BIG["x"], number)})
    return keys


def test_payloads_outlive_the_process_that_made_them(sites: Site) -> None:
    identity = CacheIdentity(model="m")
    store = sites.store()
    writer = sites.client(stores=[store.url], identity=identity)
    payloads = {kind: make(kind, seed=5) for kind, make in MAKERS.items()}
    for kind, data in payloads.items():
        assert writer.put(kind, data)
    assert data.request_id == kind  # the caller's own is as it was
    assert not writer.put("tensors", payloads["tensors"])
    assert writer.drain(timeout=60)
    writer.close()
    reader = sites.client(stores=[store.url], identity=identity)
    until_reachable(reader)
    assert reader.contains([*payloads, "absent"]) == [True] * len(payloads) + [False]
    for kind, received in zip(payloads, reader.get_many(payloads), strict=True):
        assert difference(received, MAKERS[kind](identity.key(kind), seed=5)) == ""
        assert received is not None
        received.release()
    assert reader.get_many(["absent"]) == [None]
    assert reader.stats()["hits"] == {"here": 0, "stores": len(payloads), "peers": 0}
    assert misses(reader) == {"absent": 1}


def test_peers_find_each_others_payloads_without_a_store(sites: Site) -> None:
    first = sites.client()
    second = sites.client(peers=[first.url])
    until_reachable(second)
    keys = fill(first, range(3))
    assert second.contains(keys) == [True] * 3
    assert numbers_of(second, [*keys, "absent"]) == [0, 1, 2, None]
    assert numbers_of(first, keys) == [0, 1, 2]
    assert first.stats()["hits"]["here"] == second.stats()["hits"]["peers"] == 3


def test_a_list_of_peers_may_have_this_process(site: Site) -> None:
    url = site.new_url()
    client = site.client(url=url, peers=[url])
    assert client.stats()["sources"] == []


def test_another_identity_is_a_miss_of_its_own_kind(site: Site, tmp_path: Path) -> None:
    for budget in ("32MiB", "1MiB"):  # in memory, and in a file alone
        store = site.store(budget, files=tmp_path / budget)
        options = {"stores": [store.url]}
        writer = site.client(**options, identity=CacheIdentity(model="m", dtype="bfloat16"))
        reader = site.client(**options, identity=CacheIdentity(model="m", dtype="float16"))
        writer.put("k", BIG)
        assert writer.drain(timeout=60)
        until_reachable(reader)
        assert reader.get_many(["k"]) == [None]
        assert misses(reader) == {"other_identity": 1}


def test_a_store_that_comes_later_and_is_lost_and_is_back(site: Site) -> None:
    """What is kept here is offered again, whenever a store comes."""
    url = site.new_url()
    writer = site.client(stores=[url])
    keys = fill(writer, range(3))
    assert numbers_of(writer, [*keys, "absent"]) == [0, 1, 2, None]
    assert misses(writer) == {"unreachable": 1}
    for _ in range(2):
        store = site.store(url=url)
        reader = site.client(stores=[url])
        until_reachable(reader)
        until(lambda found=reader: all(found.contains(keys)), "the store has all")  # type: ignore[misc]
        assert numbers_of(reader, keys) == [0, 1, 2]
        store.close()
        until(lambda: not writer.stats()["sources"][0]["reachable"], "its end was noticed")
        assert numbers_of(reader, keys) == [None] * 3
        assert misses(reader) == {"unreachable": 3}
        reader.close()


def test_a_store_that_is_killed(site: Site, tmp_path: Path) -> None:
    """With a directory, all that it has taken is back; no writer is needed."""
    url, files = site.new_url(), tmp_path / "files"
    where = f"{url}?directory={site.root}"
    with store_process(where, "--budget", "32MiB", "--directory", files) as store:
        writer = site.client(stores=[url])
        keys = fill(writer, range(4))
        assert writer.drain(timeout=60)
        writer.close()
        kill_store(store)
    with store_process(where, "--budget", "32MiB", "--directory", files):
        reader = site.client(stores=[url])
        until_reachable(reader)
        assert reader.contains(keys) == [True] * 4
        assert numbers_of(reader, keys) == [0, 1, 2, 3]
        reader.close()


def test_a_peer_that_is_killed_and_comes_again(site: Site) -> None:
    url = site.new_url()
    where = f"{url}?directory={site.root}"
    reader = site.client(peers=[url])
    for seed in range(2):
        with program(KEEPER, where, seed, seed + 1) as keeper:
            assert next_line(keeper) == "kept\n"
            until_reachable(reader)
            [received] = reader.get_many([f"k{seed}"])
            assert received is not None
            assert difference(received, tensors(f"k{seed}", seed=seed)) == ""
            keeper.kill()
            keeper.wait()
            # what was received lives on
            assert difference(received, tensors(f"k{seed}", seed=seed)) == ""
            received.release()
        until(lambda: not reader.stats()["sources"][0]["reachable"], "its end was noticed")
        assert reader.get_many(["k0"]) == [None]
    assert misses(reader) == {"unreachable": 2}


def test_a_peer_that_is_stopped_is_left_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "RETRY_SECONDS", 1e9)
    url = site.new_url()
    with program(KEEPER, f"{url}?directory={site.root}", 0, 1) as keeper:
        assert next_line(keeper) == "kept\n"
        reader = site.client(peers=[url], timeout=0.1)
        until_reachable(reader)
        freeze(keeper.pid)
        assert reader.get_many(["k0"]) == [None]
        assert not reader.stats()["sources"][0]["reachable"]
        assert reader.get_many(["k0", "k1"]) == [None, None]  # it is not asked
        assert reader.contains(["k0"]) == [False]
        assert misses(reader) == {"unreachable": 3}
        reader.close()


def test_two_writers_of_one_key(site: Site) -> None:
    store = site.store()
    clients = [site.client(stores=[store.url]) for _ in range(2)]
    for client in clients:
        fill(client, range(2))
        assert client.drain(timeout=60)
    stats = store.stats()
    assert sorted(writer["fetched"] for writer in stats["writers"]) == [0, 2]
    assert sorted(writer["known"] for writer in stats["writers"]) == [0, 2]
    assert stats["link"]["transfers"]["kept"] == 2


def test_what_memory_evicts_lies_in_files(site: Site, tmp_path: Path) -> None:
    store = site.store("8MiB", files=tmp_path / "files")  # three payloads
    writer = site.client(stores=[store.url])
    keys = fill(writer, range(10))
    assert writer.drain(timeout=60)
    writer.close()
    assert store.stats()["link"]["transfers"]["evicted"] >= 7
    reader = site.client(stores=[store.url])
    until_reachable(reader)
    assert reader.contains(keys) == [True] * 10
    for key, number in zip(keys, range(10), strict=True):
        assert numbers_of(reader, [key]) == [number]
    assert store.stats()["directory"]["loaded"] >= 7
    assert store.stats()["directory"]["written"] == 10
    assert misses(reader) == {}


def test_what_memory_evicts_without_files_is_a_miss(site: Site) -> None:
    store = site.store("8MiB")
    writer = site.client(stores=[store.url])
    keys = fill(writer, range(10))
    assert writer.drain(timeout=60)
    writer.close()
    reader = site.client(stores=[store.url])
    until_reachable(reader)
    found = numbers_of(reader, keys)
    assert found[:7] == [None] * 7
    assert found[9] == 9
    assert misses(reader) == {"evicted": found.count(None)}


def test_a_payload_larger_than_memory(site: Site, tmp_path: Path) -> None:
    with pytest.raises(CapacityError):
        site.client(budget="1MiB").put("k0", BIG)
    store = site.store("1MiB")
    writer = site.client(stores=[store.url])
    keys = fill(writer, range(1))
    assert writer.drain(timeout=60)
    [counted] = store.stats()["writers"]
    assert (counted["fetched"], counted["refused"]) == (0, 1)
    assert store.stats()["no_memory"] == 1
    filed = site.store("1MiB", files=tmp_path / "files")
    other = site.client(stores=[filed.url])
    fill(other, range(1))
    assert other.drain(timeout=60)
    other.close()
    reader = site.client(stores=[filed.url])
    until_reachable(reader)
    assert numbers_of(reader, keys) == [None]  # the file is there, and no memory for it
    assert misses(reader) == {"absent": 1}
    assert filed.stats()["directory"]["loaded"] == 1


def test_flipped_bits_in_the_files_of_a_store(site: Site, tmp_path: Path) -> None:
    files, choose = tmp_path / "files", random.Random(3)
    url = site.new_url()
    store = site.store(url=url, files=files)
    writer = site.client(stores=[url])
    keys = [f"k{number}" for number in range(40)]
    for number, key in enumerate(keys):
        writer.put(key, tensors(key, seed=number))
    assert writer.drain(timeout=60)
    writer.close()
    store.close()
    for key in keys[:30]:
        path = files / file_name(key)
        flip(path, choose.randrange(path.stat().st_size), 1 << choose.randrange(8))
    store = site.store(url=url, files=files)
    reader = site.client(stores=[url])
    until_reachable(reader)
    received = reader.get_many(keys)
    assert received[:30] == [None] * 30
    for number, data in enumerate(received[30:], 30):
        assert data is not None
        assert difference(data, tensors(f"k{number}", seed=number)) == ""
        data.release()
    assert store.stats()["directory"]["damaged"] == 30
    assert misses(reader) == {"damaged": 30}
    assert reader.contains(keys) == [False] * 30 + [True] * 10


def test_a_reader_that_dies_keeps_no_memory(site: Site) -> None:
    store = site.store("8MiB")
    writer = site.client(stores=[store.url])
    [first] = fill(writer, range(1))
    assert writer.drain(timeout=60)
    with program(READER, f"{store.url}?directory={site.root}", first) as reader:
        assert next_line(reader) == "held\n"
        fill(writer, range(1, 8))
        assert writer.drain(timeout=60)
        assert store.stats()["link"]["transfers"]["leased"] == 1
        other = site.client(stores=[store.url])
        until_reachable(other)
        assert other.contains([first]) == [True]  # it was not evicted while it was read
        reader.kill()
    until(lambda: store.stats()["link"]["transfers"]["leased"] == 0, "its lease is gone")
    fill(writer, range(8, 12))
    assert writer.drain(timeout=60)
    assert other.contains([first]) == [False]


def test_a_withdrawn_payload_is_gone_everywhere(site: Site, tmp_path: Path) -> None:
    store = site.store(files=tmp_path / "files")
    writer = site.client(stores=[store.url])
    keys = fill(writer, range(2))
    assert writer.withdraw(keys[0])
    assert not writer.withdraw("absent")
    assert writer.drain(timeout=60)
    assert writer.contains(keys) == [False, True]
    assert store.stats()["directory"]["files"] == 1
    assert writer.put(keys[0], BIG)  # and can be put again
    assert writer.drain(timeout=60)
    assert store.stats()["directory"]["files"] == 2


def test_a_store_connects_to_nobody_that_it_was_not_told_of(site: Site) -> None:
    store = site.store(writers=["shm://engine-*"])
    with pytest.warns(RuntimeWarning, match="start it with --writers"):
        writer = refused_client(site, url="shm://other", stores=[store.url])
    assert "--writers" in writer.stats()["sources"][0]["last_error"]
    fill(writer, range(1))
    assert store.stats()["writers"] == []
    assert not writer.drain(timeout=0.1)
    assert numbers_of(writer, ["k0"]) == [0]
    allowed = site.client(url="shm://engine-1", stores=[store.url])
    fill(allowed, range(1))
    assert allowed.drain(timeout=60)


@pytest.mark.parametrize(
    "url",
    [
        "shm://engine-1?directory=/tmp",
        "shm://engine-1/../x",
        "shm://other",
        "zmq+tcp://engine-1:7400",
        "zmq+tcp://10.0.0.1.example.org:7400",
        "zmq+tcp://10.0.0.1:7400@example.org:1",
        "zmq+tcp://10.0.0.1:7400?insecure=1",
        "ucx://10.0.0.1:7400",
        "inproc://engine-1",
        "auto://engine-1",
        "auto://engine-1?tcp=10.0.1.1:7400",
        "auto://engine-1?tcp=10.0.0.1:7400&insecure=1",
        "auto://engine-1?insecure=1&tcp=10.0.0.1:7400",
        "shm://",
        "engine-1",
    ],
)
def test_urls_that_a_reader_makes_up(url: str, site: Site) -> None:
    writers = ["shm://engine-*", "zmq+tcp://10.0.0.*:*", "auto://engine-*?tcp=10.0.0.*:*"]
    store = site.store(writers=writers)
    key = Attachment("0" * 32, url).key
    with (
        KVLink.connect(store.url, timeout=60, directory=site.root) as link,
        pytest.raises(TransferFailed, match="it may not connect to"),
    ):
        link.get(key, timeout=60)
    assert store.stats()["writers"] == []


def test_patterns_with_their_options(site: Site) -> None:
    writers = ["zmq+tcp://10.0.0.*:*?insecure=1", "shm://**", "shm://a"]
    policy = site.store(writers=writers).policy
    assert policy.options_for("zmq+tcp://10.0.0.7:7400") is not None
    assert policy.options_for("zmq+tcp://10.0.0.7:7400")["insecure"] is True  # type: ignore[index]
    assert policy.options_for("shm://a.b")["directory"] == site.root  # type: ignore[index]
    writers = ["auto://e-*?tcp=10.0.0.*:*&insecure=1"]
    policy = site.store(writers=writers).policy
    options = policy.options_for("auto://e-1?tcp=10.0.0.7:7400")
    assert options is not None
    assert (options["insecure"], "tcp" in options) == (True, False)
    for wrong in ("nothing://*", "*", "shm://x?quota=much"):
        with pytest.raises(SchemaError):
            site.store(writers=[wrong])


def test_more_writers_than_a_store_takes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_WRITERS", 1)
    store = site.store()
    first = site.client(stores=[store.url])
    fill(first, range(1))
    assert first.drain(timeout=60)
    with pytest.warns(RuntimeWarning, match="start another store"):
        refused_client(site, stores=[store.url])


def test_more_offers_than_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers_module, "MAX_QUEUED", 4)
    url = site.new_url()
    writer = site.client(stores=[url])
    keys = fill(writer, range(12))
    store = site.store(url=url)
    until(lambda: all(key in store.contents for key in keys), "all were offered in the end")


class FullQueue(SimpleQueue[Any]):
    """A queue that is always said to be full; its reader may wait at that moment."""

    def qsize(self) -> int:
        return MAX_QUEUED


def test_offers_that_find_the_queue_full(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wake the thread; and a withdrawal is sent whatever waits before it."""
    monkeypatch.setattr(offers_module, "SimpleQueue", FullQueue)
    store = site.store()
    writer = site.client(stores=[store.url])
    for number in range(3):
        [key] = fill(writer, range(number, number + 1))
        until(partial(store.contents.__contains__, key), "it was offered")
    writer.withdraw(key)
    until(lambda: key not in store.contents, "the store has heard of the withdrawal")


def test_close_waits_for_the_stores(site: Site) -> None:
    store = site.store()
    writer = site.client(stores=[store.url])
    keys = fill(writer, range(3))
    writer.close(drain=60)
    assert [key in store.contents for key in keys] == [True] * 3
    writer.close()
    with pytest.raises(ClosedError):
        writer.contains(keys)


def test_what_readers_hold_lives_on(site: Site) -> None:
    writer = site.client()
    fill(writer, range(1))
    [received] = writer.get_many(["k0"])
    assert received is not None
    writer.withdraw("k0")
    assert (received["x"] == 0).all()
    writer.close()
    assert (received["x"] == 0).all()
    received.release()


def test_a_fork_has_no_client(site: Site) -> None:
    client = site.client()
    pid = os.fork()
    if not pid:
        try:
            client.contains(["a"])
        except ClosedError:
            client.close()
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_wrong_arguments(site: Site) -> None:
    client = site.client()
    with pytest.raises(SchemaError, match="metadata="):
        client.put("k", TensorTransferData("k", BIG), {"a": 1})
    with pytest.raises(SchemaError):
        client.put("", BIG)
    with pytest.raises(SchemaError, match="stores"):
        site.client(stores=5)
    with pytest.raises(SchemaError, match="budget"):
        site.client(budget="much")


def test_readers_and_writers_at_once(site: Site, tmp_path: Path) -> None:
    """Four processes write and one reads, while memory evicts: each payload is right or a miss."""
    store = site.store("1MiB", files=tmp_path / "files")
    where = f"?directory={site.root}"
    reader = site.client(stores=[store.url])
    until_reachable(reader)
    choose, found = random.Random(1), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writers = [
            program(KEEPER, f"{site.new_url()}{where}", 50 * n, 50 * n + 50, store.url + where)
            for n in range(3)
        ]
        with writers[0] as a, writers[1] as b, writers[2] as c:
            while found < 300:
                numbers = [choose.randrange(150) for _ in range(8)]
                received = reader.get_many([f"k{number}" for number in numbers])
                for number, data in zip(numbers, received, strict=True):
                    if data is not None:
                        found += 1
                        expected = tensors(f"k{number}", seed=number)
                        assert difference(data, expected) == ""
                        data.release()
            for process in (a, b, c):
                assert process.poll() is None
    assert set(misses(reader)) <= {"absent", "evicted"}


def test_own_payloads_are_read_where_they_lie_and_stay_longer(site: Site) -> None:
    """Nothing connects to the client's link; `contains` and `get_many` count as use."""
    with site.client(budget="8MiB") as client:
        keys = fill(client, range(3))
        assert client.contains(keys[:1]) == [True]
        [received] = client.get_many(keys[1:2])
        assert received is not None
        assert client.stats()["link"]["path"] == []  # no reader
        received.release()
        fill(client, range(3, 4))  # for which the one that was not used is evicted
        assert client.contains([*keys, "k3"]) == [True, True, False, True]
        assert client.stats()["misses"]["evicted"] == 0
        assert client.get_many(keys[2:3]) == [None]
        assert client.stats()["misses"]["evicted"] == 1
