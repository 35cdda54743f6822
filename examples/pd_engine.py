"""The engine of the prefill/decode example: a random Qwen2, and what each stage does with it."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file

from omni_kvlink import KVConsumer, KVLink, KVMetadata, KVProducer
from omni_kvlink.adapters import DynamicCacheAdapter, make_cache
from omni_kvlink.lookup import LookupConsumer, LookupProducer, Match, PrefixStore

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 1000
Piece = tuple[int, int, int]
"""A prompt's number, and the tokens of it, from and to, that went through the model together."""


def make_prompts(number: int, seed: int = 5) -> list[list[int]]:
    """Prompts that share beginnings: families of them, some popular, and some asked again."""
    dice = random.Random(seed)
    families = [tokens(dice, dice.randint(100, 300)) for _ in range(max(1, number // 10))]
    prompts: list[list[int]] = []
    for _ in range(number):
        kind = dice.random()
        if prompts and kind < 0.2:
            prompts.append(list(dice.choice(prompts[-20:])))
        elif kind < 0.9:
            family = families[min(int(dice.expovariate(0.3)), len(families) - 1)]
            prompts.append(family + tokens(dice, dice.randint(10, 60)))
        else:
            prompts.append(tokens(dice, dice.randint(100, 300)))
    return prompts


def tokens(dice: random.Random, number: int) -> list[int]:
    return [dice.randrange(VOCABULARY) for _ in range(number)]


class State(NamedTuple):
    """A prompt that was read: its cache, the hidden states `[n, dim]` of its last n tokens."""

    cache: Any
    hidden: torch.Tensor
    pieces: list[Piece]


class Engine:
    """A Qwen2 of random weights, the same in every process; batches of one."""

    def __init__(self, dtype: str):
        config = transformers.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=1024,
        )
        torch.manual_seed(11)
        self._model = transformers.Qwen2ForCausalLM(config).to(getattr(torch, dtype)).eval()
        weights = hashlib.sha256(transformers.__version__.encode())
        for name, weight in sorted(self._model.state_dict().items()):
            weights.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
        self.name = f"qwen2-{dtype}-{weights.hexdigest()[:16]}"
        """Of the model, its weights and the code that runs it: K and V of another are refused."""

    def read(self, prompt: list[int], number: int, match: Match) -> State:
        """Take what was found, and compute only what is missing."""
        pieces: list[Piece] = []
        cache = make_cache(self._model.config)
        if match.data is not None:
            pieces = [*map(tuple, match.data.metadata.extra["pieces"])]
            DynamicCacheAdapter().load(match.data, cache)
        pieces.append((number, match.tokens, len(prompt)))
        if match.hidden is not None:
            return State(cache, match.hidden, pieces)
        return State(cache, self.forward(prompt[match.tokens :], cache), pieces)

    def replay(self, prompts: list[list[int]], pieces: list[Piece]) -> State:
        """The same pieces in one process, without a store or a link."""
        cache = make_cache(self._model.config)
        hidden, start = torch.empty(0), 0
        for number, first, last in pieces:
            if first:
                cache = self._cropped(cache, first)
            if first == last:
                hidden = hidden[: last - start]
            else:
                hidden, start = self.forward(prompts[number][first:last], cache), first
        return State(cache, hidden, pieces)

    def write(self, state: State, steps: int) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the logits `[steps, vocabulary]` that chose them."""
        logits = [self.logits(state.hidden)]
        for _ in range(steps - 1):
            logits.append(self.logits(self.forward([int(logits[-1].argmax())], state.cache)))
        return [int(step.argmax()) for step in logits], torch.stack(logits)

    def forward(self, prompt: list[int], cache: Any) -> torch.Tensor:
        """The last hidden states `[tokens, dim]`; their K and V go into the cache."""
        with torch.no_grad():
            out = self._model.model(torch.tensor([prompt]), None, None, cache)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _cropped(self, cache: Any, tokens: int) -> Any:
        """Its first tokens; transformers' own `crop` is another one in each version."""
        data = DynamicCacheAdapter().export(cache, request_id="cropped")
        metadata = KVMetadata((tokens,), (tokens,), data.metadata.num_layers)
        first = data.first_tokens(tokens, metadata)
        return DynamicCacheAdapter().load(first, make_cache(self._model.config))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the last token."""
        with torch.no_grad():
            logits: torch.Tensor = self._model.lm_head(hidden[None, -1:])[0, 0]
        return logits


# The two stages. Each is a process of its own that does what it is told, line by line.


def run_producer(engine: Engine, url: str, prompts: list[list[int]], budget: int) -> None:
    """Prefill prompts, and answer queries for their prefixes."""
    with KVLink.serve(url, quota=budget) as link:
        peers, store = connect_peers(link), PrefixStore(link)
        with LookupProducer(store, peers, model=engine.name) as producer:
            for job in jobs():
                report(prefill(engine, store, prompts[job["prompt"]], job["prompt"]))
            report(producer.stats())


def prefill(engine: Engine, store: PrefixStore, prompt: list[int], number: int) -> dict[str, Any]:
    try:
        with store.select(prompt) as match:  # a producer uses what it has, too
            state = engine.read(prompt, number, match)
            layers = DynamicCacheAdapter().export(state.cache, request_id="prefix").layer_blocks
            store.insert(
                prompt,
                None,
                [key for key in layers["key_cache"] if key is not None],
                [value for value in layers["value_cache"] if value is not None],
                state.hidden,
                extra={"pieces": [list(piece) for piece in state.pieces]},
            )
            return {"computed": len(prompt) - match.tokens}
    except BaseException as error:
        store.fail(prompt, repr(error))  # or readers would wait until their timeouts
        raise


def run_consumer(
    engine: Engine, url: str, prompts: list[list[int]], steps: int, timeout: float, scratch: Path
) -> None:
    """Look prompts up, compute what is missing, and decode."""
    with KVLink.serve(url) as link:
        peers = connect_peers(link)
        with LookupConsumer(link, peers, model=engine.name, verify="full") as lookup:
            for job in jobs():
                number = job["prompt"]
                began = time.perf_counter()
                with lookup.select(prompts[number], wait=job["wait"], timeout=timeout) as match:
                    found = time.perf_counter()
                    state = engine.read(prompts[number], number, match)
                    engine.logits(state.hidden)
                    ready = time.perf_counter()
                    chosen, logits = engine.write(state, steps)
                save_file({"logits": logits}, scratch / f"{number}.safetensors")
                report(
                    {
                        "tokens": chosen,
                        "pieces": state.pieces,
                        "asked": match.requested,
                        "found": match.tokens,
                        "complete": match.is_complete,
                        "select": found - began,
                        "compute": ready - found,
                    }
                )


def connect_peers(link: KVProducer) -> list[KVConsumer]:
    """Report this stage's URL, read those of its peers, and connect to them."""
    report({"url": link.url})
    return [KVLink.connect(url, timeout=60.0) for url in json.loads(sys.stdin.readline())]


def jobs() -> Any:
    return map(json.loads, sys.stdin)


def report(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
