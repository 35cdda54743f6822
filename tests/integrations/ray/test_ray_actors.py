"""Tensors passed by reference between actors on two nodes: sums, deaths, leaks, limits of Ray."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import CapacityError, PeerLostError, SchemaError
from omni_kvlink.testing.rig import until
from support.doc_blocks import blocks
from support.engine.ray_cluster import two_nodes
from support.ray.tensors import digest, many_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.engine.ray_cluster import Nodes

# Not "ray": a folder of tests that has this name would do.
pytest.importorskip("ray.experimental", reason="needs `pip install 'omni-kvlink[ray]'`")

import ray

from support.ray import actors

OBJECTS, WINDOW = 10_000, 100
GROWTH = 32 << 20
"""Bytes that a process may grow by; 8,000 objects of 16 KiB would be 131 MB."""


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Nodes]:
    with two_nodes() as made:
        yield made


def maker(node: str = "head") -> Any:
    return ray.remote(num_cpus=0, resources={node: 0.1})(actors.TensorSource).remote()


def reader(node: str = "head", *, enable: bool = True) -> Any:
    options = {"enable_tensor_transport": True} if enable else {}
    made = ray.remote(num_cpus=0, resources={node: 0.1}, **options)(actors.TensorReader)
    return made.remote()


@pytest.fixture(scope="module")
def source(nodes: Nodes) -> Any:
    return maker()


@pytest.fixture(scope="module")
def readers(nodes: Nodes) -> list[Any]:
    return [reader() for _ in range(3)]


def total(seed: int, *shape: int) -> float:
    torch.manual_seed(seed)
    return float(torch.randn(shape or (256, 256)).sum())


def transfers(actor: Any, name: str = "kvlink") -> dict[str, Any]:
    producer = ray.get(actor.stats.remote(name))["producers"][0]
    return {**producer["transfers"], "used": producer["memory"]["used"]}


def until_empty(actor: Any) -> None:
    """Wait until the actor keeps no object, and no memory of one."""
    until(lambda: not transfers(actor)["kept"], "its objects are collected")
    until(lambda: not transfers(actor)["used"], "their memory is free")


def test_three_readers_have_the_sums_of_the_source(source: Any, readers: list[Any]) -> None:
    references = [source.make.remote(seed) for seed in range(4)]
    for seed, reference in enumerate(references):
        sums = ray.get([each.total.remote(reference) for each in readers])
        assert sums == [total(seed)] * 3
    assert transfers(source)["kept"] == 4
    del references, reference
    until_empty(source)


def test_three_readers_are_bit_equal_for_each_kind_of_tensor(
    source: Any, readers: list[Any]
) -> None:
    reference = source.make_kinds.remote()
    digests = ray.get([each.digest.remote(reference) for each in readers])
    value = ray.get(reference)
    assert digests == [digest(many_kinds())] * 3 == [digest([value["first"], *value["others"]])] * 3
    assert value["count"] == len(many_kinds())


def test_a_reader_may_write_to_what_it_received(source: Any, readers: list[Any]) -> None:
    reference = source.make.remote(1)
    for each in (*readers, readers[0]):
        assert ray.get(each.write.remote(reference)) == total(1)


def test_views_are_readonly_memory_of_the_source(source: Any, readers: list[Any]) -> None:
    one = readers[0]
    reference = source.make_for_views.remote(2)
    ray.get(one.hold.remote(reference))
    assert ray.get(one.held_total.remote()) == total(2)
    assert ray.get(one.is_in_link_memory.remote()) == (True, "r--s")


def test_objects_without_tensors_are_values(source: Any, readers: list[Any]) -> None:
    assert ray.get(readers[0].echo.remote(source.make_none.remote())) == "no tensor"


def test_a_process_outside_actors_puts_and_gets(source: Any, readers: list[Any]) -> None:
    one = readers[0]
    tensor = torch.randn(300, 300)
    reference = ray.put(tensor, _tensor_transport="kvlink")
    assert ray.get(one.total.remote(reference)) == float(tensor.sum())
    made = source.make.remote(5, 10, 10)
    buffer = torch.zeros(10, 10)
    ray.experimental.set_target_for_ref(made, [buffer])
    assert ray.get(made).data_ptr() == buffer.data_ptr()
    assert float(buffer.sum()) == total(5, 10, 10)


def test_a_reference_in_a_list_is_got_by_its_actor(source: Any, readers: list[Any]) -> None:
    reference = source.make.remote(6)
    # Ray passes no reference in a list before its owner knows of the object: a get waits for that.
    assert ray.get(readers[1].total.remote(reference)) == total(6)
    assert ray.get(readers[0].total_of_nested.remote([reference])) == total(6)


def test_another_node_reads_over_tcp(source: Any, readers: list[Any]) -> None:
    there = maker("other")
    reference = there.make_for_tcp.remote(7)
    assert ray.get(readers[0].total.remote(reference)) == total(7)
    path = ray.get(there.stats.remote("kvlink-tcp"))["producers"][0]["path"]
    assert [(each["transport"], each["encrypted"]) for each in path] == [("zmq+tcp", True)]


def test_the_programs_of_the_page(nodes: Nodes, tmp_path: Path) -> None:
    found = [one for one in blocks("docs/guides/ray.md") if one.language in ("python", "output")]
    program, output, settings = (block.text for block in found)
    for text, printed in ((program, output), (settings, "")):
        file = tmp_path / "program.py"
        file.write_text(text)
        done = subprocess.run(
            [sys.executable, str(file)],
            env={**os.environ, "RAY_ADDRESS": nodes.address},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_a_dead_source_is_named_to_its_readers(source: Any, readers: list[Any]) -> None:
    dead, old, new, _ = maker(), *readers
    reference = dead.make.remote(8)
    assert ray.get(old.total.remote(reference)) == total(8)
    os.kill(ray.get(dead.pid.remote()), signal.SIGKILL)
    for each in (old, new):
        with pytest.raises(PeerLostError, match="is gone, and the tensors with it"):
            ray.get(each.total.remote(reference))
        assert ray.get(each.echo.remote(1)) == 1  # the reader itself lives


def test_a_dead_reader_takes_nothing_with_it(source: Any, readers: list[Any]) -> None:
    dead, last, alive = reader(), reader(), readers[0]
    reference = source.make.remote(9)
    ray.get(dead.hold.remote(reference))
    os.kill(ray.get(dead.pid.remote()), signal.SIGKILL)
    assert ray.get(alive.total.remote(reference)) == total(9)
    # one that dies with a transfer on its way
    pending = last.total.remote(source.make.remote(10, 4096, 1024))
    os.kill(ray.get(last.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get([pending, last.echo.remote(1)])
    assert ray.get(alive.total.remote(reference)) == total(9)
    del reference, pending
    until_empty(source)


def test_a_full_quota_is_the_error_of_the_task(source: Any, readers: list[Any]) -> None:
    one = readers[0]
    first = source.make_small.remote(1_200_000)
    assert ray.get(one.total.remote(first)) == 1_200_000
    with pytest.raises(CapacityError, match=r"raise quota= of register\(\)"):
        ray.get(source.make_small.remote(1_200_000))
    assert ray.get(one.total.remote(first)) == 1_200_000
    assert transfers(source, "kvlink-small")["evicted"] == 0


def test_a_tensor_that_is_not_sent_is_the_error_of_the_task(
    source: Any, readers: list[Any]
) -> None:
    with pytest.raises(SchemaError, match="complex64"):
        ray.get(source.make_complex.remote())


def test_a_reader_without_tensor_transport_is_warned_about(
    source: Any, readers: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    one, reference = reader(enable=False), source.make.remote(11)
    ray.get(readers[0].total.remote(reference))
    with caplog.at_level(logging.WARNING, "omni_kvlink"):
        for _ in range(2):
            ray.get(one.total.remote(reference))
    (record,) = caplog.records
    assert "enable_tensor_transport=True" in record.getMessage()


@pytest.mark.timeout(3600)
def test_ten_thousand_objects_leave_nothing(source: Any, readers: list[Any]) -> None:
    one, before = readers[0], None
    until_empty(source)  # what earlier tests have left is not counted
    ended = transfers(source)["withdrawn"]
    for first in range(0, OBJECTS, WINDOW):
        references = [source.make.remote(seed, 4096) for seed in range(WINDOW)]
        sums = ray.get([one.total.remote(each) for each in references])
        assert sums[first // WINDOW % WINDOW] == total(first // WINDOW % WINDOW, 4096)
        del references
        if before is None and first >= OBJECTS // 5:
            before = ray.get([source.footprint.remote(), one.footprint.remote()])
    until_empty(source)
    after = ray.get([source.footprint.remote(), one.footprint.remote()])
    assert before is not None
    for (files, nbytes), (files_after, nbytes_after) in zip(before, after, strict=True):
        assert files_after <= files
        assert nbytes_after < nbytes + GROWTH
    counters = transfers(source)
    assert (counters["withdrawn"] - ended, counters["evicted"]) == (OBJECTS, 0)
