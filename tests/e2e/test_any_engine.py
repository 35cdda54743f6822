"""The toy engine of the guide: two processes give the tokens of one, over each connector."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from support.connectors.zmq_addresses import free_port

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "any_engine.py"
spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    import any_engine

    return any_engine


def in_one_process(example: Any) -> dict[str, list[int]]:
    engine, tokens = example.Engine(), {}
    for name, prompt in example.PROMPTS.items():
        blocks = engine.allocate(len(prompt) + example.NEW_TOKENS)
        first = [engine.step(blocks, *item) for item in enumerate(prompt)][-1]
        tokens[name] = engine.generate(blocks, len(prompt), first)
        engine.free += blocks
    return tokens


def url(scheme: str) -> str:
    ends = {
        "shm": f"shm://any-engine-{os.getpid()}",
        "zmq+tcp": f"zmq+tcp://127.0.0.1:{free_port()}",
        "auto": f"auto://any-engine-{os.getpid()}?tcp=127.0.0.1:{free_port()}",
    }
    return ends[scheme]


@pytest.mark.parametrize("scheme", ["shm", "zmq+tcp", "auto"])
def test_two_processes_give_the_tokens_of_one(
    example: Any, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill stage that is killed in the middle, and starts again, changes nothing."""
    link, stages = url(scheme), []

    def start() -> None:
        stages.append(spawn.Process(target=example.prefill, args=(link,)))
        stages[-1].start()

    generate, generated = example.Engine.generate, []

    def restart_in_the_middle(self: Any, *arguments: Any) -> Any:
        generated.append(arguments)
        if len(generated) == 4:
            stages[0].kill()
            stages[0].join()
            start()
        return generate(self, *arguments)

    expected = in_one_process(example)
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    monkeypatch.setattr(example.Engine, "generate", restart_in_the_middle)
    start()
    try:
        assert example.decode(link) == expected
    finally:
        for stage in stages:
            stage.kill()
            stage.join()
    assert len(stages) == 2


def test_the_page_has_room_for_it() -> None:
    assert EXAMPLE.read_text().count("\n") <= 80
