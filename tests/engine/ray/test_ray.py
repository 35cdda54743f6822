"""Ranks and stages as Ray actors, on two nodes: images, deaths, restarts, a lost node."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import TransferTimeout
from omni_kvlink.engine import (
    DiffusionEngine,
    EngineDeadError,
    EngineError,
    OmniDiffusion,
    RayConfig,
    RequestAborted,
    StageActor,
)
from support.engine.fixtures import WAIT, alone, bundle, checkpoint, config, link, request, until
from support.engine.multiproc import EngineUnderTest, engine_with_ranks
from support.engine.ray_cluster import NODES, Nodes, pids_alive, two_nodes
from support.faults.frozen import freeze

if TYPE_CHECKING:
    from collections.abc import Iterator

ray = pytest.importorskip("ray", reason="needs `pip install 'omni-kvlink[ray]'`")

HOW = {"height": 16, "width": 24, "num_inference_steps": 5}
LONG = {**HOW, "num_inference_steps": 1_000_000}
SOON = 8.0
"""Seconds in which a death must be reported."""
EXAMPLE = Path(__file__).parents[3] / "examples" / "engine_two_stage.py"
CONNECT_TWICE = """
import ray, sys
from omni_kvlink.engine.ray.cluster import Cluster
one, two = Cluster(sys.argv[1]), Cluster("auto")
one.close(), one.close()
assert ray.is_initialized()
two.close()
assert not ray.is_initialized()
ray.init(sys.argv[1])
Cluster("auto").close()
assert ray.is_initialized()
"""
SHUT_DOWN = """
import ray, sys
from omni_kvlink.engine import EngineDeadError, OmniARConfig, OmniDiffusionRequest, StageActor
from omni_kvlink.engine import KVConfig, OmniDiffusionSamplingParams
ray.init(sys.argv[1])
kv = KVConfig(sinks=("zmq+tcp://{node}:0",))
stage = StageActor(OmniARConfig(sys.argv[2], dtype="float32", kv=kv))
request = OmniDiffusionRequest("a fox " * 40_000, OmniDiffusionSamplingParams(), "busy")
busy = stage.submit(request)
ray.shutdown()
try:
    stage.stats()
except EngineDeadError as error:
    print(error)
assert not ray.is_initialized()
stage.close()
print(repr(busy.result(1).error))
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as made:
        yield made


@pytest.fixture(autouse=True)
def as_many_threads_as_actors() -> None:
    torch.set_num_threads(1)  # the KV and the images made here must have the actors' sums


@pytest.fixture(autouse=True)
def leaves_no_actor(nodes: Nodes) -> Iterator[None]:
    yield
    until(lambda: not pids_alive())
    until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


def ranks(sockets: str, count: int, **fields: Any) -> Any:
    """An engine with `count` ranks, each on a node of its own."""
    where = RayConfig(strategy="STRICT_SPREAD")
    how = {"distributed_executor_backend": "ray", "ray": where, **fields}
    return engine_with_ranks(sockets, count, "zmq", **how)


def stages(connector: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """An AR stage on the other node, a DiT stage where this process is."""
    first = {"stage_id": 0, "own_process": "ray", "ray": {"resources": {"other": 0.5}}}
    second = {"stage_id": 1, "own_process": "ray", "ray": {"resources": {"head": 0.5}}, **fields}
    if connector is None:
        return {"pipeline": "bagel", "stages": [first, second]}
    second["input_connectors"] = {"from_stage_0": "wire"}
    wires = {"wire": connector}
    return {"pipeline": "bagel", "stages": [first, second], "connectors": wires}


ZMQ = {"name": "KVLinkConnector", "extra": {"url": "zmq+tcp://{node}:0"}}


def omni(how: dict[str, Any], **more: Any) -> OmniDiffusion:
    return OmniDiffusion(checkpoint(), how, dtype="float32", num_threads=1, **more)


def actor(made: OmniDiffusion, number: int) -> StageActor:
    stage = made.stages[number]
    assert isinstance(stage, StageActor)
    return stage


def check_images(made: OmniDiffusion, count: int = 1) -> None:
    params = [{**HOW, "seed": seed} for seed in range(count)]
    images = made.generate(["a fox"] * count, params, timeout=WAIT, output_type="pt")
    for seed, image in enumerate(images):
        assert torch.equal(image[0], alone(seed=seed))


def in_process(sockets: str, name: str, **fields: Any) -> torch.Tensor:
    """The image of UniprocExecutor."""
    shape = fields["height"], fields["width"]
    with (
        link(sockets, "zmq") as producer,
        DiffusionEngine(config(producer, sockets, num_threads=1)) as engine,
    ):
        producer.put(bundle(name, shape=shape))
        return engine.generate([request(name, **fields)], timeout=WAIT)[0].result()


def generate(stage: EngineUnderTest, name: str, **fields: Any) -> torch.Tensor:
    future = stage.submit(name, **fields)
    stage.send(name, seed=fields.get("seed", 0))
    image: torch.Tensor = future.result(WAIT).result()[0]
    return image


@pytest.mark.parametrize("count", [1, 2])
def test_the_same_images_as_in_one_process(sockets: str, count: int) -> None:
    with ranks(sockets, count) as stage:
        assert len({location["address"] for location in stage.executor.locations}) == count
        images, receipts = stage.images({f"r{seed}": seed for seed in range(5)})
        for seed, image in enumerate(images):
            assert torch.equal(image, alone(seed=seed))
        for receipt in receipts:
            receipt.wait(timeout=WAIT)
        kv = stage.engine.stats()["kv"]
        assert (kv["charged"], kv["workers"]["charged"]) == (0, 0)
        assert (kv["workers"]["received"], kv["workers"]["freed"]) == (5, 5)
        assert stage.engine.sleep(1)
        assert stage.engine.wake_up()
        many = {
            "height": 64,
            "width": 64,
            "num_outputs_per_prompt": 12,
        }  # larger than what Ray inlines
        futures = [stage.submit("many", **many)]
        stage.send("many", shape=(64, 64))
        assert torch.equal(futures[0].result(WAIT).result(), in_process(sockets, "many", **many))
    assert ray.is_initialized()  # it was before


@pytest.mark.parametrize("connector", [ZMQ, None], ids=["zmq", "auto"])
def test_stages_on_two_nodes(connector: dict[str, Any] | None) -> None:
    with omni(stages(connector)) as made:
        assert [actor(made, number).address for number in (0, 1)] == list(reversed(NODES))
        assert NODES[1] in actor(made, 0).sink_urls[0]
        check_images(made, 4)
        _, dit = made.stats()
        assert (dit["kv"]["received"], dit["kv"]["charged"]) == (4, 0)
        until(lambda: made.stats()[0]["link"]["memory"]["used"] == 0)  # the releases arrive


@pytest.mark.parametrize("degree", ["data_parallel_size", "cfg_parallel_size"])
def test_a_stage_in_an_actor_with_ranks_in_actors(degree: str) -> None:
    deaths = []
    how = stages(ZMQ, distributed_executor_backend="ray", **{degree: 2})
    with omni(how, on_death=lambda stage, error: deaths.append((stage, str(error)))) as made:
        check_images(made, 3)
        assert actor(made, 1).sleep(2)
        assert actor(made, 1).wake_up()
        check_images(made, 2)
        (_, rank) = pids_alive("RankHost")
        os.kill(rank, signal.SIGKILL)
        until(lambda: deaths)
        assert deaths[0][0] == 1
        assert "rank" in deaths[0][1]


def test_a_rank_that_is_killed_while_it_generates(sockets: str) -> None:
    with ranks(sockets, 2) as stage:
        generate(stage, "warm")
        futures = [stage.submit(name, num_inference_steps=1_000_000) for name in ("a", "b")]
        for name in ("a", "b"):
            stage.send(name)
        until(lambda: stage.engine.stats()["running"])
        pids = [location["pid"] for location in stage.executor.locations]
        started = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        for future in futures:
            with pytest.raises(EngineDeadError, match="rank 1 of the dit stage"):
                future.result(WAIT).result()
        assert time.monotonic() - started < SOON
        for name in ("a", "b"):  # as `OmniDiffusion` does; otherwise they wait for another reader
            stage.producer.abort(name, "its reader is gone")
        until(lambda: len(stage.deaths) == 1)
        with pytest.raises(EngineDeadError, match="restart"):
            stage.submit("early")
        until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
        stage.engine.restart()
        assert torch.equal(generate(stage, "again", seed=3), alone(seed=3))
        assert len(stage.deaths) == 1


def test_a_rank_that_is_frozen(sockets: str) -> None:
    with ranks(sockets, 2) as stage:
        pid = stage.executor.locations[1]["pid"]
        stage.executor.check_health(timeout=SOON)
        freeze(pid)
        with pytest.raises(EngineDeadError, match="frozen"):
            stage.executor.check_health(timeout=0.5)
        until(lambda: len(stage.deaths) == 1)
        until(lambda: not os.path.exists(f"/proc/{pid}"))
        stage.engine.restart()
        assert torch.equal(generate(stage, "again", seed=3), alone(seed=3))


def test_an_abort_while_a_rank_generates(sockets: str) -> None:
    with ranks(sockets, 1) as stage:
        busy = stage.submit("busy", num_inference_steps=1_000_000)
        receipt = stage.send("busy")
        until(lambda: stage.engine.stats()["running"] == 1)
        with pytest.raises(TransferTimeout, match=r"rank 0 within 0\.2 s"):
            stage.executor.collective_rpc("sleep", timeout=0.2, args=[3])
        stage.engine.abort("busy")
        with pytest.raises(RequestAborted):
            busy.result(WAIT).result()
        receipt.wait(timeout=WAIT)
        with pytest.raises(ValueError, match="level 3"):
            stage.executor.collective_rpc("sleep", timeout=WAIT, args=[3])
        with pytest.raises(AttributeError, match="dance"):
            stage.executor.collective_rpc("dance", timeout=WAIT)
        assert torch.equal(generate(stage, "next", seed=3), alone(seed=3))


def test_killed_stages_restart_at_the_same_url() -> None:
    deaths: list[int] = []
    with omni(stages(ZMQ), on_death=lambda stage, _: deaths.append(stage)) as made:
        check_images(made)
        urls = actor(made, 0).sink_urls
        for number in (1, 0):
            busy = made.submit("a fox " * (1 if number else 40_000), LONG, request_id=f"b{number}")
            if number:
                until(lambda: actor(made, 1).stats()["running"] == 1)
            os.kill(actor(made, number).pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="a Ray actor, is gone"):
                busy.result(WAIT).result()
            made.restart(number)
            assert actor(made, 0).sink_urls == urls
            check_images(made, 2)
        assert deaths == [1, 0]
        until(lambda: actor(made, 0).stats()["link"]["memory"]["used"] == 0)
        busy = made.submit("a fox", LONG, request_id="busy")
        until(lambda: actor(made, 1).stats()["running"] == 1)
        made.abort("busy")
        with pytest.raises(RequestAborted):
            busy.result(WAIT).result()


def test_the_stage_of_a_lost_node_restarts_on_another(nodes: Nodes) -> None:
    reported = threading.Event()
    try:
        with omni(stages(ZMQ), on_death=lambda *_: reported.set()) as made:
            assert actor(made, 0).address == NODES[1]
            check_images(made)
            busy = made.submit("a fox " * 40_000, LONG, request_id="busy")
            started = time.monotonic()
            nodes.kill_other()
            with pytest.raises(EngineDeadError, match="the ar stage, a Ray actor"):
                busy.result(WAIT).result()
            assert reported.wait(SOON)
            assert time.monotonic() - started < 2 * SOON
            first = actor(made, 0)
            first.config = dataclasses.replace(first.config, ray=RayConfig())  # on any node
            made.restart(0)
            assert [actor(made, number).address for number in (0, 1)] == [NODES[0]] * 2
            check_images(made, 2)
    finally:
        nodes.add_other()


def test_errors_during_startup_name_the_cause(
    nodes: Nodes,
) -> None:
    def start(model: str = "", **fields: Any) -> None:
        how = config(None, distributed_executor_backend="ray", **fields)
        if model:
            object.__setattr__(how, "model", model)
        DiffusionEngine(how)

    with pytest.raises(FileNotFoundError, match="nowhere"):
        start("/nowhere")
    with pytest.raises(EngineError, match="say 'cuda'"):
        start(device="cuda:1")
    with pytest.raises(EngineError, match=rf"in the Ray cluster at {nodes.address}, not"):
        start(ray=RayConfig(address="127.0.0.9:1"))
    with pytest.raises(TransferTimeout, match=r"no room for 1 × .*'CPU': 64"):
        start(ray=RayConfig(num_cpus=64), start_timeout=1.0)


def test_a_process_that_was_in_a_cluster_stays_there(nodes: Nodes) -> None:
    run(sys.executable, "-c", CONNECT_TWICE, nodes.address)


def test_a_stage_whose_cluster_is_shut_down(nodes: Nodes) -> None:
    output = run(sys.executable, "-c", SHUT_DOWN, nodes.address, checkpoint())
    assert output.splitlines()[0].startswith("the ar stage")
    ends = "EngineDeadError", "ClosedError"  # the latter, at `close`, if Ray said nothing
    assert output.splitlines()[-1].startswith(ends)


def test_the_example_runs_on_ray(nodes: Nodes) -> None:
    args = ["--requests", "4", "--steps", "4", "--batch", "1", "--ray", nodes.address]
    output = run(sys.executable, str(EXAMPLE), *args)
    assert output.count("4 of 4 images bit-exact") == 2
    assert output.count(" 0 held at the end") == 2


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
