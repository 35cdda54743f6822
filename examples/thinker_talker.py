"""Thinker and talker of Qwen2.5-Omni in two processes: the talker speaks while the thinker writes.

A tiny Qwen2.5-Omni of random weights, of transformers' own classes, is made on the spot. The
thinker appends the states of each token to a stream; each step of the talker reads those of one
token more. At the end the text, the talker's hidden states, logits and codec tokens, and the audio
are compared, bit by bit, with what the model's own `generate` makes in one process; the exit status
says whether all are equal. out/thinker_talker.svg shows when each step ran.

    python examples/thinker_talker.py                                  # 4 requests at once
    python examples/thinker_talker.py --url zmq+tcp://127.0.0.1:0
    python examples/thinker_talker.py --url 'ucx://127.0.0.1:0?trusted_network=1'
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import omni_model
import torch
import transformers
from omni_model import Request
from omni_stages import TalkerOutput, ThinkerOutput, talk, text_embeddings, think
from timeline import Row, Span, timeline

from omni_kvlink import KVLink


def run_both(
    model: Any, requests: list[Request], connector: str
) -> tuple[list[ThinkerOutput], list[TalkerOutput]]:
    """Think here, and talk in another process."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    names = [request.name for request in requests]
    with KVLink.serve(connector) as link:
        talker = spawn.Process(target=talk, args=(link.url, names, theirs))
        talker.start()
        theirs.close()  # so that recv() raises EOFError if the talker dies
        link.put(text_embeddings(model), ttl=60.0)
        assert mine.recv() == "ready"
        with ThreadPoolExecutor(len(requests)) as pool:
            thoughts = list(pool.map(partial(think, model.thinker, link), requests))
        spoken = mine.recv()
    talker.join()
    return thoughts, spoken


def verdict(
    model: Any, requests: list[Request], thoughts: list[ThinkerOutput], spoken: list[TalkerOutput]
) -> bool:
    """Compare with transformers' own `generate` in this process alone."""
    same = dict.fromkeys(("text", "codec tokens", "hidden states", "logits", "audio"), 0)
    for request, thought, (speech, _) in zip(requests, thoughts, spoken, strict=True):
        ids, alone = omni_model.in_one_process(model, request)
        pairs = zip((thought.ids, *speech), (ids, *alone), strict=True)
        for name, (here, there) in zip(same, pairs, strict=True):
            same[name] += here == there
    for name, number in same.items():
        word = "identical" if number == len(requests) else "DIFFERENT"
        print(f"  {name:13} {word}: {number} of {len(requests)} are the single process's")
    return set(same.values()) == {len(requests)}


def report(
    requests: list[Request], thoughts: list[ThinkerOutput], spoken: list[TalkerOutput]
) -> None:
    """Say how the stages overlapped."""
    everything = zip(requests, thoughts, spoken, strict=True)
    for request, (ids, nbytes, thought), (_, talked) in everything:
        prompt, left = request.ids.shape[1], sum(span.begin > talked[0].end for span in thought)
        print(
            f"  {request.name}: {prompt} + {len(ids) - prompt} tokens of text, {len(thought)} "
            f"chunks, {nbytes:,} bytes; {len(talked) - 1} steps of the talker, the first one "
            f"before the last {left} of the thinker"
        )


def draw(out: Path, thoughts: list[ThinkerOutput], spoken: list[TalkerOutput]) -> None:
    """Draw the steps, and write down when they were, in milliseconds."""
    zero = min(thought.spans[0].begin for thought in thoughts)
    rows: list[Row] = []
    for number, (thought, talked) in enumerate(zip(thoughts, spoken, strict=True)):
        for who, spans in (("thinker", thought.spans), ("talker", talked.spans)):
            ms = [
                Span(kind, round(1e3 * (begin - zero), 1), round(1e3 * (end - zero), 1))
                for kind, begin, end in spans
            ]
            rows.append(Row(f"request {number}, {who}", ms))
    out.mkdir(parents=True, exist_ok=True)
    (out / "thinker_talker.json").write_text(json.dumps({"ms": rows}) + "\n")
    picture = out / "thinker_talker.svg"
    picture.write_text(timeline("ms", rows))
    print(f"  {picture}")


def main() -> int:
    args = parse_arguments()
    if not hasattr(transformers, "Qwen2_5OmniConfig"):
        sys.exit(f"transformers {transformers.__version__} has no Qwen2.5-Omni")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # the same number everywhere, for the same sums
    model, requests = omni_model.make_model(), omni_model.make_requests(args.requests)
    print(f"Qwen2.5-Omni of random weights: {args.requests} requests over {args.url}\n")
    thoughts, spoken = run_both(model, requests, args.url)
    report(requests, thoughts, spoken)
    draw(args.out, thoughts, spoken)
    return 0 if verdict(model, requests, thoughts, spoken) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = f"shm://thinker-talker-{os.getpid()}"
    parser.add_argument("--url", "--connector", default=default, help="the link's URL")
    parser.add_argument("--requests", default=4, type=int, help="requests at once")
    parser.add_argument("--out", default=Path("out"), type=Path, help="directory of the picture")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
