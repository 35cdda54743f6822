"""The model of examples/thinker_talker.py: a Qwen2.5-Omni of random weights, and its requests.

The classes are those of transformers; nothing is downloaded, and both processes make the same
weights. Beside them, what one process alone makes of a request, by the model's own `generate`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Iterator

IS_OLD = int(transformers.__version__.partition(".")[0]) < 5
"""Before 5, `generate` gives the vocoder all codes but the last, whatever that is."""
WIDTH, MELS, VOCABULARY = 256, 16, 160
AUDIO, AUDIO_BEGIN, AUDIO_END = 150, 151, 152
TEXT_STOP, TEXT_END, TEXT_PAD = 39, 153, 154
CODEC_BEGIN, CODEC_END, CODEC_PAD, CODEC_MASK = 155, 68, 157, 158
SPEAKERS = {"Chelsie": 148, "Ethan": 149}
"""Names, and the text token that begins an answer of each."""

GREEDY = {"do_sample": False, "top_k": None, "top_p": None, "temperature": None}
THINKER = {**GREEDY, "max_new_tokens": 24, "eos_token_id": [TEXT_STOP], "repetition_penalty": 1.3}
TALKER = {**GREEDY, "max_new_tokens": 40, "eos_token_id": [CODEC_END], "repetition_penalty": 1.05}
TOKEN2WAV = {"num_steps": 4}


class Request(NamedTuple):
    """A prompt of text; with audio, if `inputs` has some."""

    name: str
    speaker: str
    seed: int
    ids: torch.Tensor
    inputs: dict[str, torch.Tensor]


def make_requests(number: int) -> list[Request]:
    """Prompts of different lengths; every other one has audio in it."""
    requests = []
    for seed in range(number):
        dice = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, min(SPEAKERS.values()), (1, 14 + 3 * seed), generator=dice)
        inputs = {"attention_mask": torch.ones_like(ids)}
        if seed % 2:
            ids[0, 1:8] = torch.tensor([AUDIO_BEGIN, *[AUDIO] * 5, AUDIO_END])
            inputs["input_features"] = torch.randn(1, MELS, 20, generator=dice)
            inputs["feature_attention_mask"] = torch.ones(1, 20, dtype=torch.int64)
        speaker = list(SPEAKERS)[seed % len(SPEAKERS)]
        requests.append(Request(f"req-{seed}", speaker, seed, ids, inputs))
    return requests


def make_model() -> Any:
    """A Qwen2_5OmniForConditionalGeneration: thinker, talker and vocoder."""
    tokens = {
        "audio_token_index": AUDIO,
        "audio_start_token_id": AUDIO_BEGIN,
        "audio_end_token_id": AUDIO_END,
        "image_token_index": VOCABULARY - 1,
        "video_token_index": VOCABULARY - 1,
        "vision_start_token_id": VOCABULARY - 1,
        "vision_end_token_id": VOCABULARY - 1,
    }
    config = transformers.Qwen2_5OmniConfig(
        thinker_config={**tokens, **_thinker_config()},
        talker_config={**tokens, **_talker_config()},
        token2wav_config=_token2wav_config(),
    )
    torch.manual_seed(4)
    model = transformers.Qwen2_5OmniForConditionalGeneration(config).eval().requires_grad_(False)
    model.speaker_map = {
        name: {"bos_token": bos, "cond": torch.randn(1, MELS), "ref_mel": torch.randn(1, 20, MELS)}
        for name, bos in SPEAKERS.items()
    }
    return model


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [8, 12, 12]},
}


def _thinker_config() -> dict[str, Any]:
    return {
        "text_config": DECODER,
        "audio_config": {
            "num_mel_bins": MELS,
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "n_window": 8,
            "max_source_positions": 64,
            "output_dim": WIDTH,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "fullatt_block_indexes": [0],
            "out_hidden_size": WIDTH,
        },
    }


def _talker_config() -> dict[str, Any]:
    return {
        **DECODER,
        "embedding_size": WIDTH,
        "head_dim": 64,
        "tts_text_start_token_id": SPEAKERS["Chelsie"],
        "tts_text_end_token_id": TEXT_END,
        "tts_text_pad_token_id": TEXT_PAD,
        "tts_codec_start_token_id": CODEC_BEGIN,
        "tts_codec_end_token_id": CODEC_END,
        "tts_codec_pad_token_id": CODEC_PAD,
        "tts_codec_mask_token_id": CODEC_MASK,
    }


def _token2wav_config() -> dict[str, Any]:
    return {
        "dit_config": {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 32,
            "emb_dim": 32,
            "look_ahead_layers": [1],
            "look_backward_layers": [0],
            "num_embeds": VOCABULARY,
            "mel_dim": MELS,
            "enc_emb_dim": MELS,
            "enc_dim": 16,
            "enc_channels": [16, 16, 16, 16, 48],
            "enc_attention_channels": 8,
            "enc_se_channels": 8,
            "max_position_embeddings": 512,
        },
        "bigvgan_config": {
            "mel_dim": MELS,
            "upsample_initial_channel": 32,
            "upsample_rates": [5, 4],
            "upsample_kernel_sizes": [11, 8],
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3, 5]],
        },
    }


def copy_of(module: Any) -> Any:
    """A copy for one request, with the same weights: the modules keep positions and hooks."""
    shared = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})


class SpeechBits(NamedTuple):
    """What the talker and the vocoder made of a request, bit by bit."""

    codes: bytes
    hidden: list[bytes]
    """Of each step, what the last layer gave to the codec head."""
    logits: list[bytes]
    wave: bytes


class Recorder:
    """Records what a talker's steps compute, and what its vocoder is given."""

    def __init__(self) -> None:
        self._hidden: list[bytes] = []
        self._logits: list[bytes] = []
        self._codes = b""

    @contextlib.contextmanager
    def record(self, talker: Any, token2wav: Any) -> Iterator[None]:
        """Within the block, record all that these two modules do."""
        hooks = [
            talker.codec_head.register_forward_hook(self._step),
            token2wav.register_forward_pre_hook(self._begin_wave),
        ]
        yield
        for hook in hooks:
            hook.remove()

    def speech(self, wave: torch.Tensor) -> SpeechBits:
        return SpeechBits(self._codes, self._hidden, self._logits, _bits(wave))

    def _step(self, head: Any, inputs: tuple[torch.Tensor], logits: torch.Tensor) -> None:
        self._hidden.append(_bits(inputs[0]))
        self._logits.append(_bits(logits))

    def _begin_wave(self, token2wav: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._codes = _bits(inputs[0])


def in_one_process(model: Any, request: Request) -> tuple[list[int], SpeechBits]:
    """The token ids and the audio that transformers itself makes of a request."""
    named = (("thinker", THINKER), ("talker", TALKER), ("token2wav", TOKEN2WAV))
    options = {f"{part}_{name}": value for part, own in named for name, value in own.items()}
    recorder = Recorder()
    with recorder.record(model.talker, model.token2wav):
        torch.manual_seed(request.seed)  # the vocoder begins with noise
        ids, wave = model.generate(
            request.ids, speaker=request.speaker, **request.inputs, **options
        )
    return ids[0].tolist(), recorder.speech(wave)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
