"""Stages in processes of their own: deaths, restarts, aborts, and the codec of their messages."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

from omni_kvlink import CapacityError, KVLink, PeerLostError, TransferFailed, TransferTimeout
from omni_kvlink.engine import (
    EngineDeadError,
    EngineError,
    KVConfig,
    OmniARConfig,
    OmniDiffusion,
    OmniDiffusionConfig,
    OmniDiffusionRequest,
    RequestAborted,
    RequestFailed,
    StageProcess,
)
from omni_kvlink.engine.ipc.codec import pack, unpack, unpack_error
from omni_kvlink.engine.kv_sent import KVSent
from omni_kvlink.engine.outputs import DiffusionOutput
from support.engine.fixtures import WAIT, alone, checkpoint, params, until, url

HOW = {"height": 16, "width": 24, "num_inference_steps": 5}
TWO: dict[str, Any] = {
    "pipeline": "bagel",
    "stages": [
        {"stage_id": 0},
        {"stage_id": 1, "own_process": True, "input_connectors": {"from_stage_0": "wire"}},
    ],
    "connectors": {"wire": {"name": "SharedMemoryConnector"}},
}


def pid_of(stage: Any) -> int:
    assert isinstance(stage, StageProcess)
    return stage.pid


def two(own_process: bool, connector: str = "shm") -> dict[str, Any]:
    wire: dict[str, Any] = {"name": "SharedMemoryConnector"}
    if connector == "zmq":
        wire = {"name": "KVLinkConnector", "extra": {"url": "zmq+tcp://127.0.0.1:0"}}
    stages = [{**TWO["stages"][0]}, {**TWO["stages"][1], "own_process": own_process}]
    return {**TWO, "stages": stages, "connectors": {"wire": wire}}


@pytest.mark.parametrize("connector", ["shm", "zmq"])
def test_an_ar_process_that_is_killed_is_reported_and_restarted(connector: str) -> None:
    deaths, reported = [], threading.Event()

    def on_death(stage: int, error: Exception) -> None:
        deaths.append((stage, error))
        reported.set()

    how = two(False, connector)
    with OmniDiffusion(checkpoint(), how, on_death=on_death, dtype="float32") as omni:
        (before,) = omni.generate("a fox", {**HOW, "seed": 1}, timeout=WAIT, output_type="pt")
        # counting its tokens alone takes minutes
        busy = omni.submit("a fox " * 40_000, HOW, request_id="busy")
        os.kill(pid_of(omni.stages[0]), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="status -9"):
            busy.result(WAIT).result()
        assert reported.wait(WAIT)
        assert [stage for stage, _ in deaths] == [0]
        with pytest.raises(EngineDeadError, match="restart"):
            omni.submit("a fox", HOW, request_id="too early")
        assert omni.stages[1].stats()["kv"]["charged"] == 0
        omni.restart(0)
        (after,) = omni.generate("a fox", {**HOW, "seed": 1}, timeout=WAIT, output_type="pt")
        assert torch.equal(before, after)
        assert torch.equal(after[0], alone(seed=1))


def test_a_dit_process_that_is_killed_while_it_generates() -> None:
    deaths: list[int] = []
    with OmniDiffusion(
        checkpoint(), two(True), on_death=lambda stage, _: deaths.append(stage), dtype="float32"
    ) as omni:
        omni.generate("a fox", HOW, timeout=WAIT)
        busy = omni.submit("a fox", {**HOW, "num_inference_steps": 50_000}, request_id="busy")
        until(lambda: omni.stages[1].stats()["running"] == 1)
        os.kill(pid_of(omni.stages[1]), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="status -9"):
            busy.result(WAIT).result()
        until(lambda: omni.stages[0].stats()["link"]["memory"]["used"] == 0)  # its KV is released
        until(lambda: deaths == [1])
        omni.restart(1)
        (image,) = omni.generate("a fox", {**HOW, "seed": 3}, timeout=WAIT, output_type="pt")
        assert torch.equal(image[0], alone(seed=3))


@pytest.mark.parametrize("own_process", [False, True])
def test_an_abort_while_it_generates(own_process: bool) -> None:
    with OmniDiffusion(checkpoint(), two(own_process), dtype="float32") as omni:
        busy = omni.submit("a fox", {**HOW, "num_inference_steps": 50_000}, request_id="r")
        until(lambda: omni.stages[1].stats()["running"] == 1)
        omni.abort("r")
        with pytest.raises(RequestAborted):
            busy.result(WAIT).result()
        until(lambda: omni.stages[0].stats()["link"]["memory"]["used"] == 0)
        (image,) = omni.generate("a fox", {**HOW, "seed": 3}, timeout=WAIT, output_type="pt")
        assert torch.equal(image[0], alone(seed=3))


def test_an_error_of_the_ar_stage_reaches_the_consumer(sockets: str) -> None:
    kv = KVConfig(sinks=(url(),), sink_options={"directory": sockets})
    how = OmniARConfig(checkpoint(), dtype="float32", num_blocks=2, block_size=4, kv=kv)
    with (
        StageProcess(how) as stage,
        KVLink.connect(stage.sink_urls[0], timeout=WAIT, directory=sockets) as consumer,
    ):
        prompt = "far too long for two blocks"
        request = OmniDiffusionRequest(prompt, params(), "r", need_kv_transfer=True)
        with pytest.raises(CapacityError, match="num_blocks"):
            stage.submit(request).result(WAIT).result()
        with pytest.raises(TransferFailed, match="num_blocks"):
            consumer.get("r", timeout=WAIT)
        short = OmniDiffusionRequest("a", params(), "s", need_kv_transfer=True)
        assert stage.submit(short).result(WAIT).kv_sent is not None
        stage.submit(OmniDiffusionRequest("a" * 4000, params(), "t"))
        with pytest.raises(EngineError, match="here already"):
            stage.submit(OmniDiffusionRequest(prompt, params(), "t"))


def test_a_stage_that_cannot_start_raises_the_cause() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        StageProcess(OmniARConfig("/nowhere", kv=KVConfig(sinks=(url(),))))
    with pytest.raises(TransferTimeout, match=r"engine-test|producer|within"):
        StageProcess(
            OmniDiffusionConfig(checkpoint(), kv=KVConfig(sources=(url(),), connect_timeout=0.2))
        )


def test_a_stage_that_sleeps_in_its_process(sockets: str) -> None:
    kv = KVConfig(sinks=(url(),), sink_options={"directory": sockets})
    with StageProcess(OmniARConfig(checkpoint(), kv=kv)) as stage:
        assert stage.sleep(2)
        assert stage.wake_up()
        request = OmniDiffusionRequest("a fox", params(), "r", need_kv_transfer=True)
        assert stage.submit(request).result(WAIT).error is None


def test_requests_are_decoded_unchanged() -> None:
    image = torch.arange(24, dtype=torch.uint8).reshape(2, 4, 3)
    one = OmniDiffusionRequest(
        ["a fox", image],
        params(3, cfg_interval=(0.1, 0.9), guidance_scale=2.5),
        "r",
        need_kv_receive=True,
        kv_nbytes=12,
    )
    two = unpack(pack(one))
    assert two.prompt[0] == "a fox"
    assert torch.equal(two.prompt[1], image)
    assert two.sampling_params == one.sampling_params
    assert two.key == one.key
    assert (two.request_id, two.need_kv_receive, two.kv_nbytes) == ("r", True, 12)


def test_outputs_and_errors_are_decoded_unchanged() -> None:
    image = torch.arange(24, dtype=torch.uint8).reshape(1, 2, 4, 3)
    one = DiffusionOutput("r", image, None, "words", KVSent(5, (8, 8), 3), {"execute": 0.5})
    two = unpack(pack(one))
    assert torch.equal(two.output, image)
    assert (two.text, two.kv_sent, two.seconds) == (one.text, one.kv_sent, one.seconds)
    late = unpack(pack(TransferTimeout("late", key="r", waited=1.5, phase="asked")))
    assert isinstance(late, TransferTimeout)
    assert (str(late), late.key, late.waited, late.phase) == ("late", "r", 1.5, "asked")
    assert isinstance(unpack(pack(PeerLostError("gone"))), PeerLostError)
    assert isinstance(unpack(pack(RequestAborted("no"))), RequestAborted)
    full = unpack(pack(CapacityError("full", requested=3, free=1)))
    assert (full.requested, full.free) == (3, 1)
    assert isinstance(unpack(pack(KeyError("layer"))), KeyError)
    other = unpack(pack(threading.BrokenBarrierError("strange")))
    assert isinstance(other, RequestFailed)
    assert "BrokenBarrierError" in str(other)
    assert isinstance(
        unpack_error({"kind": "as_engine_error", "text": "", "attributes": {}}), RequestFailed
    )
