"""A random two-layer Qwen2 and a tokenizer of numbered words, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = 512


def make(path: Path, *, seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float32) -> None:
    """Weights large enough that the next token hangs on the whole prompt."""
    special = ["<unk>", "<bos>", "<eos>", "<pad>"]
    names = [*(f"w{number}" for number in range(WORDS - len(special))), *special]
    vocabulary = {name: number for number, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        **{f"{name.strip('<>')}_token": name for name in special},
    ).save_pretrained(path)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=vocabulary["<bos>"],
        eos_token_id=vocabulary["<eos>"],
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.08)
    model.to(dtype).save_pretrained(path)
