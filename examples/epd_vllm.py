"""The encoder in one vLLM engine, the language model in another process's: the same tokens.

    python examples/epd_vllm.py [--connector shm://encoder]

Needs vLLM (docs/vllm_encoder.md). The model is a random BLIP-2 with two layers, made on the spot.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES, PIXELS = 4, 32
TOKENS = 32
PROMPT = [(31 * position + position * position) % 500 for position in range(40)]


def make_model(path: Path, encoder: int = 0) -> None:
    """A BLIP-2 with random weights; `encoder` is the seed of its vision encoder."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        BlipImageProcessorPil,
        PreTrainedTokenizerFast,
    )

    vocabulary = {f"w{number}": number for number in range(511)} | {"<image>": 511}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")),
        unk_token="w0",
        eos_token="w1",
        additional_special_tokens=["<image>"],
    )
    pixels = BlipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    Blip2Processor(pixels, tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    small = {"num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"hidden_size": 64, "intermediate_size": 128, "image_size": PIXELS, "patch_size": 8}
    config = Blip2Config(
        vision_config={**vision, **small},
        qformer_config={"hidden_size": 64, "intermediate_size": 128, "vocab_size": 8, **small},
        text_config={
            "model_type": "opt",
            "vocab_size": 512,
            "hidden_size": 128,
            "word_embed_proj_dim": 128,
            "ffn_dim": 256,
            "max_position_embeddings": 512,
            **small,
        },
        num_query_tokens=8,
        image_token_index=511,
    )
    model = Blip2ForConditionalGeneration(config)
    torch.manual_seed(0)
    for part, seed in ((model, 0), (model.vision_model, encoder)):
        torch.manual_seed(seed)
        with torch.no_grad():
            for weights in part.parameters():
                if weights.dim() > 1:
                    weights.normal_(0, 0.08)
    model.save_pretrained(path)


def make_image(seed: int) -> Image:
    """Random pixels."""
    import numpy as np
    from PIL.Image import fromarray

    return fromarray(np.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), np.uint8))


ENGINE: Any = None


def open_engine(model: str, role: str, extra: dict[str, Any]) -> None:
    """A vLLM engine with the connector: these are the lines that switch it on."""
    global ENGINE
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM
    from vllm.config import ECTransferConfig

    transfer = ECTransferConfig(
        ec_connector="OmniKVLinkECConnector",
        ec_connector_module_path="omni_kvlink.integrations.vllm",
        ec_role=role,
        ec_connector_extra_config=extra,
    )
    ENGINE = LLM(
        model, dtype="float32", max_model_len=512, enforce_eager=True, ec_transfer_config=transfer
    )


def generate(seed: int, tokens: int, transfer: Any = None, name: str | None = None) -> Any:
    """Run the engine of this process; `name` replaces the image's digest as its identifier."""
    from vllm import SamplingParams, TokensPrompt

    extra = {"ec_transfer_params": transfer} if transfer else None
    how = SamplingParams(
        max_tokens=tokens, temperature=0, logprobs=1, ignore_eos=True, extra_args=extra
    )
    prompt = TokensPrompt(prompt_token_ids=PROMPT, multi_modal_data={"image": make_image(seed)})
    if name is not None:
        prompt["multi_modal_uuids"] = {"image": [name]}
    (output,) = ENGINE.generate([prompt], how, use_tqdm=False)
    return output


def encode(seed: int) -> dict[str, Any]:
    """The encoder's engine: what the request of the language model's engine needs."""
    params: dict[str, Any] = generate(seed, 1).ec_transfer_params
    return params


def decode(seed: int, params: dict[str, Any] | None) -> tuple[list[int], list[float]]:
    """The language model's engine: tokens and log-probabilities; without params, it encodes."""
    done = generate(seed, TOKENS, params, name=None if params else f"local {seed}").outputs[0]
    pairs = zip(done.token_ids, done.logprobs, strict=True)
    return list(done.token_ids), [entry[token].logprob for token, entry in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", "--connector", default=f"shm://epd-{os.getpid()}", metavar="URL")
    url = parser.parse_args().url
    spawn = multiprocessing.get_context("spawn")
    # "fail": the language model's engine must not encode what it was to load.
    reads = {"peers": [url], "load_failure_policy": "fail"}
    with tempfile.TemporaryDirectory() as model:
        make_model(Path(model))
        given = (model, "ec_producer", {"url": url})
        other = (model, "ec_consumer", reads)
        with (
            ProcessPoolExecutor(1, spawn, open_engine, given) as encoder,
            ProcessPoolExecutor(1, spawn, open_engine, other) as language,
        ):
            for started in [each.submit(os.getpid) for each in (encoder, language)]:
                started.result()
            good = []
            for seed in range(IMAGES):
                params = encoder.submit(encode, seed).result()
                loaded = language.submit(decode, seed, params).result()
                good.append(loaded == language.submit(decode, seed, None).result())
                verdict = "bit-identical" if good[-1] else "NOT THE SAME"
                print(f"image {seed} encoded elsewhere; {TOKENS} tokens decoded: {verdict}")
    print("exact" if all(good) else "WRONG")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
