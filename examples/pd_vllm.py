"""Prefill in one vLLM engine, decode in another process's: the same tokens, bit for bit.

    python examples/pd_vllm.py [--connector shm://pd] [--load sync]

Needs vLLM (docs/vllm.md). The model is a random two-layer Qwen2, made on the spot.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BLOCK = 32
LENGTHS = (5, 32, 33, 300)
TOKENS = 32
Ending = tuple[list[int], list[float], int]


def make_model(path: Path) -> None:
    """A Qwen2 with random weights, and a tokenizer of numbered words."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(vocabulary), unk_token="w0", eos_token="w1"
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.08)
    model.save_pretrained(path)


def open_engine(model: str, role: str, **extra: Any) -> Any:
    """A vLLM engine with the connector: these are the lines that switch it on."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="OmniKVLinkConnector",
        kv_connector_module_path="omni_kvlink.integrations.vllm",
        kv_role=role,
        kv_connector_extra_config=extra,
    )
    return LLM(
        model,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
    )


def generate(engine: Any, prompt: list[int], tokens: int, transfer: Any = None) -> Any:
    from vllm import SamplingParams, TokensPrompt

    extra = {"kv_transfer_params": transfer} if transfer else None
    how = SamplingParams(
        max_tokens=tokens, temperature=0, logprobs=1, ignore_eos=True, extra_args=extra
    )
    (output,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], how, use_tqdm=False)
    return output


def prefill(answer: Connection, model: str, url: str) -> None:
    """The producer: computes prompts, and answers with what the consumer's requests need."""
    engine = open_engine(model, "kv_producer", url=url)
    answer.send("ready")
    while (prompt := answer.recv()) is not None:
        params = generate(engine, prompt, 1, {"do_remote_decode": True}).kv_transfer_params
        # With it, vLLM 0.31 and later report what the producer had, not what the consumer fetched.
        params.pop("remote_prefill_cached_tokens", None)
        answer.send(params)


def decode(answer: Connection, model: str, url: str, load: str) -> None:
    """The consumer: answers with what a fetched cache gives, and a local prefix-cache hit."""
    engine = open_engine(model, "kv_consumer", peers=[url], load=load)
    answer.send("ready")
    while (requested := answer.recv()) is not None:
        prompt, params = requested
        fetched = ending(generate(engine, prompt, TOKENS, params))
        engine.reset_prefix_cache()
        generate(engine, prompt, TOKENS)  # fills the prefix cache with its own
        hit = ending(generate(engine, prompt, TOKENS))
        engine.reset_prefix_cache()
        answer.send((fetched, hit))


def ending(output: Any) -> Ending:
    """Tokens, their log-probabilities, and how many of the prompt's tokens were not computed."""
    done = output.outputs[0]
    pairs = zip(done.token_ids, done.logprobs, strict=True)
    return (
        list(done.token_ids),
        [entry[token].logprob for token, entry in pairs],
        output.num_cached_tokens,
    )


def verdict(length: int, load: str, fetched: Ending, hit: Ending) -> bool:
    """One line for one prompt; whether it is what it must be."""
    apart = max(abs(a - b) for a, b in zip(fetched[1], hit[1], strict=True))
    here = (length - 1) // BLOCK * BLOCK if load == "sync" else length
    limit = 0.0 if load == "sync" else 1e-4
    good = fetched[0] == hit[0] and apart <= limit and fetched[2] == here
    word = "bit-identical" if fetched[:2] == hit[:2] else f"log-probabilities {apart:.1e} apart"
    verdict = word if good else "NOT THE SAME"
    print(f"{length:4d} tokens, {fetched[2]:3d} of them fetched; {TOKENS} decoded: {verdict}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", "--connector", default=f"shm://pd-{os.getpid()}", metavar="URL")
    parser.add_argument("--load", default="sync", choices=["sync", "async"])
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as model:
        make_model(Path(model))
        links, stages = [], []
        for target, more in ((prefill, ()), (decode, (options.load,))):
            mine, theirs = spawn.Pipe()
            arguments = (theirs, model, options.url, *more)
            stages.append(spawn.Process(target=target, args=arguments, daemon=True))
            stages[-1].start()
            theirs.close()  # then a stage that dies is heard of
            links.append(mine)
            if mine.recv() != "ready":
                raise RuntimeError(f"{target.__name__} did not start")
        producer, consumer = links
        good = []
        for length in LENGTHS:
            prompt = [(31 * position + position * position) % 500 for position in range(length)]
            producer.send(prompt)
            consumer.send((prompt, producer.recv()))
            good.append(verdict(length, options.load, *consumer.recv()))
        for link, stage in zip(links, stages, strict=True):
            link.send(None)
            stage.join(30)
    print("exact" if all(good) else "WRONG")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
