"""One trace, and one timeline, of two real processes; each exports what it saw."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVCacheTransferData, KVLink, TransferFailed

pytest.importorskip("opentelemetry.sdk")

from support.telemetry import spans as program
from support.telemetry.spans import Span, Spans, children, is_child, named, tracing_to

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "bagel_two_stage.py"
spawn = multiprocessing.get_context("spawn")


def test_bagel_in_two_processes(tmp_path: Path) -> None:
    """Each request is one trace: the AR stage's put, and under it the DiT stage's get."""
    command = f"{sys.executable} {program.__file__} {tmp_path}"
    options = {"--out": str(tmp_path), "--steps": "2", "--url": f"shm://traced-{tmp_path.name}"}
    pairs = [part for option in options.items() for part in option]
    prefixes = ["--prefix-ar", command, "--prefix-dit", command]
    demo = subprocess.run([sys.executable, str(DEMO), *pairs, *prefixes], capture_output=True)
    assert demo.returncode == 0, demo.stderr.decode()
    stages = {
        stage: json.loads((tmp_path / f"{stage}.json").read_text()) for stage in ("ar", "dit")
    }
    puts, gets = named(stages["ar"], "kvlink put"), named(stages["dit"], "kvlink get")
    keys = [put["attributes"]["kvlink.key"] for put in puts]
    assert keys == [get["attributes"]["kvlink.key"] for get in gets]
    assert len(keys) == len(set(keys)) >= 3  # the warm-up, and a request of each kind
    both: list[Span] = [*stages["ar"], *stages["dit"]]
    for put, get in zip(puts, gets, strict=True):
        assert is_child(get, put)
        assert put["attributes"]["kvlink.scheme"] == get["attributes"]["kvlink.scheme"] == "shm"
        assert put["attributes"]["kvlink.nbytes"] == get["attributes"]["kvlink.nbytes"] > 0
        assert {"copy", "publish", "get"} <= {*children(both, put)}
        assert get["end_time"] > put["start_time"]
    assert all("verify" in children(both, get) for get in gets[1:])


def cache(layers: int) -> KVCacheTransferData:
    rows = [torch.ones(4, 2, 4)] * layers
    about = {"kv_lens": [4], "ropes": [4], "num_layers": layers}
    return KVCacheTransferData("a", {"key_cache": rows, "value_cache": rows}, metadata=about)


def read_in_vain(url: str, directory: str, results: SimpleQueue[Any]) -> None:
    with tracing_to(Spans()) as spans:
        with KVLink.connect(url, timeout=60, directory=directory) as consumer:
            stream = consumer.stream_get("a", timeout=60)
            stream.wait_for_layer(0)
            results.put("layer 0 is here")
            with pytest.raises(TransferFailed, match="out of tokens"):
                stream.wait_for_layer(1)
        results.put(spans.all())


def test_a_failed_transfer_of_two_processes(sockets: str) -> None:
    results: SimpleQueue[Any] = spawn.SimpleQueue()
    url = "shm://failing"
    with tracing_to(Spans()) as spans, KVLink.serve(url, directory=sockets) as producer:
        reader = spawn.Process(target=read_in_vain, args=(url, sockets, results))
        reader.start()
        out, rows = producer.stream_put(cache(2)), torch.ones(4, 2, 4)
        out.write_layer(0, rows, rows)
        assert results.get() == "layer 0 is here"
        out.fail("out of tokens")
        theirs: list[Span] = results.get()
        reader.join()
    [put], [get] = spans.named("kvlink put"), named(theirs, "kvlink get")
    assert is_child(get, put)
    for span in (put, get):
        assert span["status"]["status_code"] == "ERROR"
        assert span["attributes"]["error.type"] == "TransferFailed"
    assert [event["attributes"]["kvlink.layer"] for event in put["events"]] == [0]
