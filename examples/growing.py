"""Two stages that compute at the same time: hidden states are sent while more of them are made.

python examples/growing.py

A recurrent model, the thinker, makes hidden states step by step; another one, the talker, in a
process of its own, makes audio of each. The audio is compared with that of one process, bit by bit.
"""

from __future__ import annotations

import multiprocessing
import os
import time

import torch

from omni_kvlink import KVLink, KVProducer

STEPS, ROWS, WIDTH = 10, 4, 64
COMPUTE = 0.03
"""Seconds of a step, beside its arithmetic."""
Spans = list[tuple[float, float]]


def model(seed: int) -> torch.nn.GRU:
    torch.manual_seed(seed)
    return torch.nn.GRU(WIDTH, WIDTH).requires_grad_(False)


class Stage:
    """A model that keeps its state from step to step, and notes when each one began and ended."""

    def __init__(self, seed: int):
        self._model, self._state = model(seed), torch.zeros(1, WIDTH)
        self.spans: Spans = []

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        began = time.monotonic()
        out: torch.Tensor
        out, self._state = self._model(rows, self._state)
        time.sleep(COMPUTE)
        self.spans.append((began, time.monotonic()))
        return out


def talk(url: str, pipe: multiprocessing.connection.Connection) -> None:
    """Make audio of each chunk of hidden states as it arrives."""
    talker = Stage(2)
    with KVLink.connect(url, timeout=20.0) as link:
        pipe.send("ready")
        stream = link.read_stream("req-1", timeout=20.0)
        audio = [talker.step(chunk.data["hidden"]) for chunk in stream]
    pipe.send((torch.cat(audio).numpy().tobytes(), talker.spans))


def think(link: KVProducer, prompt: torch.Tensor) -> Spans:
    """Make hidden states, and send each chunk of them at once."""
    thinker = Stage(1)
    with link.open_stream("req-1", {"hidden": torch.empty(0, WIDTH)}, window=4) as out:
        for rows in prompt.split(ROWS):
            out.append({"hidden": thinker.step(rows)})
    out.commit().wait(timeout=20.0)  # committed by the block: this returns its receipt
    return thinker.spans


def in_one_process(prompt: torch.Tensor) -> bytes:
    thinker, talker = Stage(1), Stage(2)
    audio = [talker.step(thinker.step(rows)) for rows in prompt.split(ROWS)]
    return torch.cat(audio).numpy().tobytes()


def show(thought: Spans, talked: Spans) -> None:
    """Draw █ where the thinker makes a chunk, ▒ where the talker uses it; a character is 10 ms."""
    zero = thought[0][0]
    for number, spans in enumerate(zip(thought, talked, strict=True)):
        line = ""
        for (start, stop), mark in zip(spans, "█▒", strict=True):
            line = line.ljust(round((start - zero) / 0.01)) + mark * round((stop - start) / 0.01)
        print(f"chunk {number}: {line}")
    apart = sum(stop - start for start, stop in thought + talked)
    print(f"both stages together {talked[-1][1] - zero:.2f} s, one after the other {apart:.2f} s")


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    url = f"shm://growing-{os.getpid()}"
    talker = spawn.Process(target=talk, args=(url, theirs))
    prompt = torch.randn(STEPS * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    with KVLink.serve(url) as link:
        talker.start()
        theirs.close()  # so that recv() raises EOFError if the talker dies
        assert mine.recv() == "ready"
        thought = think(link, prompt)
        audio, talked = mine.recv()
    talker.join()
    show(thought, talked)
    if audio != in_one_process(prompt):
        raise SystemExit("the audio is not that of one process")
    print(f"{len(audio)} bytes of audio, bit for bit those of one process")


if __name__ == "__main__":
    main()
