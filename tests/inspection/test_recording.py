"""Recordings, in this process: what is written, what is read again, what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from omni_kvlink import FileError, IntegrityError, KVLink, MissingFileError, WireError
from omni_kvlink.inspection import PayloadFile, Recorder, Recording, Replay, read_recording
from omni_kvlink.inspection.replay import delays
from omni_kvlink.payload.views import dense
from support.payloads.payload_files import flip
from support.payloads.random_caches import cache
from support.payloads.small_payloads import MAKERS, bytes_of, tensors

if TYPE_CHECKING:
    from pathlib import Path


def record(folder: Path, *keys: str) -> None:
    with (
        KVLink.serve("inproc://recorded") as producer,
        Recorder(KVLink.connect("inproc://recorded", timeout=5.0), folder) as consumer,
    ):
        for seed, key in enumerate(keys):
            producer.put(tensors(key, seed=seed))
            consumer.get(key, timeout=5.0).release()


def replay(folder: Path, producer: Any, **options: Any) -> Replay:
    return Replay(folder, read_recording(folder), producer, **{"speed": math.inf, **options})


@pytest.mark.parametrize("kind", MAKERS)
def test_the_bytes_that_arrived_are_recorded(kind: str, tmp_path: Path) -> None:
    with (
        KVLink.serve("inproc://arrived") as producer,
        Recorder(KVLink.connect("inproc://arrived", timeout=5.0), tmp_path) as consumer,
    ):
        producer.put(MAKERS[kind]("a/../b\n"))
        data: Any
        with consumer.get("a/../b\n", timeout=5.0) as data:
            assert not data.difference(MAKERS[kind]("a/../b\n"))
    [found] = read_recording(tmp_path)
    payload = (tmp_path / found.file).read_bytes()
    assert payload == bytes_of(MAKERS[kind]("a/../b\n"))
    assert found.sha256 == hashlib.sha256(payload).hexdigest()
    assert (found.key, found.call, found.nbytes) == ("a/../b\n", "get", len(payload))
    assert found.seconds >= 0
    listed = (tmp_path / "digests.txt").read_text()
    assert listed == f"{found.sha256}  a/../b\\n\n"


def test_both_ends_record_the_same_bytes(tmp_path: Path) -> None:
    sent, received = tmp_path / "sent", tmp_path / "received"
    with (
        Recorder(KVLink.serve("inproc://both"), sent) as producer,
        Recorder(KVLink.connect(producer.url, timeout=5.0), received) as consumer,
    ):
        producer.put(tensors("a"))
        producer.put_many(iter([cache("b"), cache("c")]))
        consumer.get("a", timeout=5.0).release()
        with consumer.get_many(["b", "c"], timeout=5.0) as payloads:
            assert len(payloads) == 2
        assert consumer.stats()["url"] == producer.url
    assert (sent / "digests.txt").read_bytes() == (received / "digests.txt").read_bytes()
    assert [one.call for one in read_recording(sent)] == ["put"] * 3
    assert [one.key for one in read_recording(received)] == ["a", "b", "c"]


@pytest.mark.parametrize("scheme", ["shm", "zmq+ipc"])
def test_a_large_payload_that_a_reader_waits_for_is_recorded(scheme: str, tmp_path: Path) -> None:
    data = cache("large", layers=4, shape=(2000, 16, 64), dtype="bfloat16")
    url = f"{scheme}://{tmp_path}/s" if scheme == "zmq+ipc" else f"shm://{tmp_path.name}"
    with (
        KVLink.serve(url) as producer,
        Recorder(KVLink.connect(url, timeout=5.0), tmp_path / "r") as consumer,
    ):
        targets = [torch.empty_like(dense(tensor)) for tensor in data.tensors()]
        options: list[dict[str, Any]] = [{}, {"into": targets}]
        for option in options:
            thread = threading.Thread(
                target=lambda option=option: consumer.get("large", timeout=60.0, **option).release()
            )
            thread.start()
            receipt = producer.put(data)
            receipt.wait(timeout=60.0)
            thread.join()
    records = read_recording(tmp_path / "r")
    assert [one.wrong for one in records] == [0, 0]
    assert {one.sha256 for one in records} == {hashlib.sha256(bytes_of(data)).hexdigest()}


def test_wrong_bytes_are_recorded_and_counted(tmp_path: Path) -> None:
    with (
        KVLink.serve("inproc://wrong") as producer,
        Recorder(KVLink.connect("inproc://wrong", timeout=5.0), tmp_path) as consumer,
    ):
        allocation = producer.allocate(cache("r"))
        engine: Any = allocation.data.tensors()[0]
        producer.put(allocation.data)
        engine[0] = 5
        consumer.get("r", timeout=5.0).release()
    [found] = read_recording(tmp_path)
    assert found.wrong == 1
    del engine, allocation


def test_what_cannot_be_written_releases_the_payload_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        KVLink.serve("inproc://full") as producer,
        Recorder(KVLink.connect("inproc://full", timeout=5.0), tmp_path / "r") as consumer,
    ):
        producer.put(tensors("a"))
        (tmp_path / "r").rename(tmp_path / "gone")
        with pytest.raises(FileError):
            consumer.get("a", timeout=5.0)
        (tmp_path / "gone").rename(tmp_path / "r")
        consumer.get("a", timeout=5.0).release()
    assert [one.key for one in read_recording(tmp_path / "r")] == ["a"]


def test_a_recording_is_not_overwritten(tmp_path: Path) -> None:
    record(tmp_path, "a")
    before = (tmp_path / "index.jsonl").read_bytes()
    with pytest.raises(FileError, match="give another directory"):
        Recording(tmp_path)
    assert (tmp_path / "index.jsonl").read_bytes() == before


def test_the_last_line_counts_if_it_is_complete(tmp_path: Path) -> None:
    record(tmp_path, "a", "b")
    index = tmp_path / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-5])
    assert [one.key for one in read_recording(tmp_path)] == ["a"]


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../000001.safetensors"},
        {"file": "/etc/passwd"},
        {"file": "1.safetensors"},
        {"time": -1.0},
        {"time": None},
        {"sha256": "x"},
        {"call": "stream"},
    ],
    ids=str,
)
def test_an_index_is_checked(change: dict[str, Any], tmp_path: Path) -> None:
    record(tmp_path, "a")
    index = tmp_path / "index.jsonl"
    index.write_text(json.dumps({**json.loads(index.read_text()), **change}) + "\n")
    with pytest.raises(WireError, match="no index of a recording"):
        read_recording(tmp_path)


def test_no_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="index"):
        read_recording(tmp_path)


@pytest.mark.parametrize("inline", ["0", "32KiB"])
def test_a_replay_has_the_recorded_bytes(inline: str, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    record(first, "a", "b", "a")
    header = next(iter(first.glob("000001*"))).read_bytes()
    with (
        KVLink.serve("inproc://again", inline=inline) as producer,
        Recorder(KVLink.connect("inproc://again", timeout=5.0), again) as consumer,
    ):
        replayed = replay(first, producer)
        for entry in replayed.put_all():
            consumer.get(entry.key, timeout=5.0).release()
        replayed.await_readers()
        assert replayed.lost == {}
    assert (first / "digests.txt").read_bytes() == (again / "digests.txt").read_bytes()
    assert (again / "000001.safetensors").read_bytes() == header


def test_a_replay_keeps_the_recorded_times(tmp_path: Path) -> None:
    record(tmp_path, "a", "b", "c")
    records = [
        msgspec.structs.replace(one, time=seconds)
        for one, seconds in zip(read_recording(tmp_path), (10.0, 12.0, 19.0), strict=True)
    ]
    assert delays(records, 2.0) == [0.0, 1.0, 4.5]
    assert delays(records, math.inf) == [0.0, 0.0, 0.0]
    with KVLink.serve("inproc://times") as producer:
        started = time.monotonic()
        list(Replay(tmp_path, records, producer, speed=100.0).put_all())
        assert time.monotonic() - started >= 0.09


def test_a_payload_that_nobody_receives_is_named(tmp_path: Path) -> None:
    record(tmp_path, "a")
    with KVLink.serve("inproc://nobody") as producer:
        replayed = replay(tmp_path, producer, ttl=0.05)
        assert len(list(replayed.put_all())) == 1
        replayed.await_readers()
        assert list(replayed.lost) == ["a"]


def test_a_file_that_was_changed_is_not_replayed(tmp_path: Path) -> None:
    record(tmp_path, "a")
    path = tmp_path / "000001.safetensors"
    flip(path, path.stat().st_size - 1, 1)
    assert PayloadFile(path).manifest.request_id == "a"
    with (
        KVLink.serve("inproc://changed") as producer,
        pytest.raises(IntegrityError, match="not the file that was recorded"),
    ):
        list(replay(tmp_path, producer).put_all())
