"""`kvlink inspect URL`: its table, its JSON document, and its errors of one line."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import KVLink, KVProducer, TensorTransferData
from omni_kvlink.cli.commands import run
from support.connectors.key_files import KeyFiles
from support.connectors.zmq_addresses import free_port, fresh_url
from support.faults.leak_checks import zmq_started as zmq_started

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
Captured = pytest.CaptureFixture[str]
LONG = "0b9c2f0e-8d55-4a10-b0a5-0d6b5c0d3b7e"


@pytest.fixture
def url(sockets: str) -> str:
    return f"shm://i?directory={sockets}"


@pytest.fixture
def producer(url: str) -> Iterator[KVProducer]:
    with KVLink.serve(url) as link:
        yield link


def put(producer: KVProducer, *keys: str) -> None:
    for key in keys:
        producer.put(TensorTransferData(key, {"x": torch.zeros(3000)}), ttl=900.0)


def test_a_table_in_80_columns(
    producer: KVProducer, url: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of plain text: a client's key is quoted, and cannot control the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    put(producer, LONG, "\x1b[31mred\n\u202e", "k" * 300)
    with producer.open_stream("append", {"x": torch.zeros(0, 4)}) as stream:
        stream.append({"x": torch.zeros(3, 4)})
        assert run(["inspect", url]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(char.isprintable() for line in lines for char in line)
    assert r"'\x1b[31mred\n\u202e'" in "".join(printed.split())
    assert "live payloads 4, leases 0" in lines[0]
    head = next(line for line in lines if line.startswith("state"))
    assert head.split() == ["state", "miss", "read", "bytes", "age", "ttl", "path", "key"]
    assert "streaming" in printed
    assert "15.0 min" in printed
    assert "append" in printed


def test_nothing_is_kept(producer: KVProducer, url: str, capsys: Captured) -> None:
    put(producer, "k")
    assert run(["inspect", url, "--prefix", "other"]) == 0
    printed = capsys.readouterr().out
    assert "live payloads 1" in printed
    assert "no payload is kept under such a key" in printed


def test_json_has_every_number(producer: KVProducer, url: str, capsys: Captured) -> None:
    put(producer, "k")
    assert run(["inspect", url, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    [payload] = document["payloads"]
    names = "key epoch state form nbytes missing reading pinned chunks age_ms ttl_ms path"
    assert list(payload) == names.split()
    assert list(document) == ["url", "payloads", "transfers", "memory"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["shm://nobody", "--timeout", "0.1"], "nobody serves"),
        (["shm://a/b"], "SchemaError"),
        (["foo://x"], "no connector 'foo'"),
        (["zmq+tcp://127.0.0.1:x"], "expected host:port"),
        (["shm://i?quotas=1"], "did you mean quota"),
        (["shm://i", "--against", "x"], "--against: of a file only"),
        (["file.safetensors", "--prefix", "x"], "--prefix: of a producer's URL only"),
        (["zmq+tcp://127.0.0.1:{port}", "--timeout", "0.1"], "nobody serves it"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], text: str, capsys: Captured) -> None:
    arguments = [argument.format(port=free_port()) for argument in arguments]
    assert run(["inspect", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_refusal_is_one_line(sockets: str, tmp_path: Path, capsys: Captured) -> None:
    files = KeyFiles(tmp_path)
    with KVLink.serve(fresh_url("tcp", sockets), **files.producer_options) as producer:
        put(producer, "secret")
        options = "&".join(f"{name}={path}" for name, path in files.consumer_options().items())
        assert run(["inspect", f"{producer.url}?{options}", "--timeout", "60"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "may not be inspected by this process: its key is a reader's" in printed.err
    assert len(printed.err.splitlines()) == 1
    assert "'secret'" not in printed.err


def test_a_link_of_the_own_process(capsys: Captured) -> None:
    name = f"inproc://inspect-{os.getpid()}"
    with KVLink.serve(name) as producer:
        put(producer, "k")
        assert run(["inspect", name]) == 0
    assert "'k'" in capsys.readouterr().out
