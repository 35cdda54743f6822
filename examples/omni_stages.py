"""The two stages of examples/thinker_talker.py: what each of its processes does.

Both run the `generate` of their own part of the model, and hooks connect them to the link: the
thinker's append what each forward pass computed, the talker's wait for what each step reads.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import omni_model
import torch
import transformers
from omni_model import Request, SpeechBits
from timeline import Span

from omni_kvlink import KVLink, TensorTransferData

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from omni_kvlink import ChunkStream, KVConsumer, KVProducer, ReceivedChunk

WAIT = 60.0
"""Seconds for each wait."""
WINDOW = 4
"""Tokens that the thinker may be ahead of the talker."""
SPEC = {
    "ids": torch.empty(1, 0, dtype=torch.int64),
    "embedding": torch.empty(1, 0, omni_model.WIDTH),
    "hidden": torch.empty(1, 0, omni_model.WIDTH),
}


class ThinkerOutput(NamedTuple):
    """What the thinker made of a request."""

    ids: list[int]
    nbytes: int
    spans: list[Span]


class TalkerOutput(NamedTuple):
    """What the talker made of it; the last span is the vocoder's."""

    speech: SpeechBits
    spans: list[Span]


class Steps:
    """When the steps of a model began and ended, in seconds."""

    def __init__(self, kind: str):
        self.spans: list[Span] = []
        self._kind, self._began = kind, 0.0

    def begin(self, *_: Any) -> None:
        self._began = time.monotonic()

    def end(self, *_: Any) -> None:
        self.spans.append(Span(self._kind, self._began, time.monotonic()))


# The thinker's process.


def think(thinker: Any, link: KVProducer, request: Request) -> ThinkerOutput:
    """Generate text, and send the states of each token as soon as they are there.

    A chunk is what one forward pass of the thinker reads and computes: the whole prompt, then the
    tokens of the answer one by one, except for the last, which is never read.
    """
    thinker, steps = omni_model.copy_of(thinker), Steps("thinker")

    def send(module: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
        states = {"embedding": output.hidden_states[0], "hidden": output.hidden_states[-1]}
        steps.end()
        out.append({"ids": named["input_ids"], **states}, timeout=WAIT)

    thinker.register_forward_pre_hook(steps.begin)
    thinker.register_forward_hook(send, with_kwargs=True)
    metadata = {"speaker": request.speaker, "seed": request.seed}
    with link.open_stream(request.name, SPEC, dim=1, metadata=metadata, window=WINDOW) as out:
        result = thinker.generate(
            request.ids,
            **request.inputs,
            **omni_model.THINKER,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
    out.commit().wait(timeout=WAIT)  # committed by the block: this returns its receipt
    return ThinkerOutput(result.sequences[0].tolist(), out.ledger.nbytes, steps.spans)


def text_embeddings(model: Any) -> TensorTransferData:
    """The thinker's embeddings of the text tokens that frame an answer: the same for all."""
    embed = model.thinker.get_input_embeddings()
    named = {**omni_model.SPEAKERS, "end": omni_model.TEXT_END, "pad": omni_model.TEXT_PAD}
    tensors = {name: embed(torch.tensor([[token]])) for name, token in named.items()}
    return TensorTransferData("text embeddings", tensors)


# The talker's process.


def talk(url: str, names: list[str], pipe: Connection) -> None:
    """Speak the answers to all requests, each in a thread of its own."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = omni_model.make_model()
    del model.thinker
    with (
        KVLink.connect(url, timeout=WAIT) as link,
        link.get("text embeddings", timeout=WAIT, verify="full") as texts,
        ThreadPoolExecutor(len(names)) as pool,
    ):
        assert isinstance(texts, TensorTransferData)
        pipe.send("ready")
        spoken = list(pool.map(partial(speak, model, link, texts), names))
    pipe.send(spoken)


def speak(model: Any, link: KVConsumer, texts: TensorTransferData, name: str) -> TalkerOutput:
    """Make codec tokens of the thinker's states as they arrive, and then audio of the codes."""
    talker, vocoder = omni_model.copy_of(model.talker), omni_model.copy_of(model.token2wav)
    steps, recorder = Steps("talker"), omni_model.Recorder()

    def add_state(module: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, Any]:
        if named.get("inputs_embeds") is None:  # a step after the prompt
            named["thinker_reply_part"] = next(reply)
        steps.begin()
        return inputs, named

    talker.register_forward_pre_hook(add_state, with_kwargs=True)
    talker.register_forward_hook(steps.end)
    with (
        link.read_stream(name, timeout=WAIT, verify="full") as stream,
        recorder.record(talker, vocoder),
    ):
        prompt = read_prompt(stream, texts)
        reply = reply_states(stream, texts)
        codes = talker.generate(**prompt, **omni_model.TALKER)[:, prompt["input_ids"].shape[1] :]
        wave, span = make_wave(model, vocoder, codes, stream.metadata)
    return TalkerOutput(recorder.speech(wave), [*steps.spans, span])


def read_prompt(stream: ChunkStream[ReceivedChunk], texts: TensorTransferData) -> dict[str, Any]:
    """The talker's prompt, of the thinker's prompt and the first token of its answer.

    This, and what the steps add to it, is what `Qwen2_5OmniForConditionalGeneration.generate` does
    after the thinker has written all. Embeddings of audio are not for the talker.
    """
    chunk = next_chunk(stream)
    is_audio = (chunk["ids"] == omni_model.AUDIO)[:, :, None]
    states = chunk["hidden"] + chunk["embedding"].masked_fill(is_audio, 0.0)
    ids, speaker = chunk["ids"].clone(), stream.metadata["speaker"]
    first = next_chunk(stream)
    bos = torch.tensor([[omni_model.SPEAKERS[speaker]]])
    codec = [omni_model.CODEC_MASK] * ids.shape[1] + [omni_model.CODEC_PAD, omni_model.CODEC_BEGIN]
    return {
        "input_ids": torch.tensor([codec]),
        "input_text_ids": torch.cat([ids, bos, first["ids"]], dim=1),
        "inputs_embeds": torch.cat(
            [states, texts[speaker], first["hidden"] + first["embedding"]], dim=1
        ),
        "attention_mask": torch.ones(1, len(codec), dtype=torch.int64),
        "use_audio_in_video": False,
        "suppress_tokens": [omni_model.CODEC_BEGIN],
        "pad_token_id": omni_model.CODEC_PAD,
    }


def reply_states(
    stream: ChunkStream[ReceivedChunk], texts: TensorTransferData
) -> Iterator[torch.Tensor]:
    """What each further step of the talker adds to its codec token: one token of text, or none."""
    for chunk in stream:
        yield chunk.data["hidden"] + chunk.data["embedding"]
    yield texts["end"]
    while True:
        yield texts["pad"]


def next_chunk(stream: ChunkStream[ReceivedChunk]) -> TensorTransferData:
    chunk = stream.receive()
    if chunk is None:
        raise ValueError(f"{stream.request_id}: {stream.count} chunks are no answer")
    return chunk.data


ONE_AT_A_TIME = threading.Lock()
"""Torch has one sequence of random numbers for all threads."""


def make_wave(
    model: Any, vocoder: Any, codes: torch.Tensor, metadata: dict[str, Any]
) -> tuple[torch.Tensor, Span]:
    """The audio of the codes, without the one that ends them, and when it was made."""
    speaker, steps = model.speaker_map[metadata["speaker"]], Steps("vocoder")
    if int(codes[0, -1]) == omni_model.CODEC_END or omni_model.IS_OLD:
        codes = codes[:, :-1]
    with ONE_AT_A_TIME:
        steps.begin()
        torch.manual_seed(metadata["seed"])
        wave: torch.Tensor = vocoder(
            codes,
            conditioning=speaker["cond"],
            reference_mel=speaker["ref_mel"],
            **omni_model.TOKEN2WAV,
        )
        steps.end()
    return wave, steps.spans[0]
