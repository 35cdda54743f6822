"""`TextSamplingParams`: which kind of answer a request wants, and how its text is written."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.hidden_states import Keep
from omni_kvlink.settings import Settings, Texts

MODALITIES = ("text", "image", "img2img")
"""The kinds of answer; "img2img" is an image made from the prompt's images."""


@dataclasses.dataclass(kw_only=True)
class TextSamplingParams(Settings):
    """The params of an answer's kind and of texts: an answer, or what think mode writes.

    `modalities` is empty for an image; ("text",) for a text, and no image; "text" with "image" or
    "img2img" for the text of think mode and an image made with it. With `logprobs`, so many of the
    likeliest tokens are returned at each place of a text, next to the one that was chosen; -1: all.
    """

    modalities: Annotated[tuple[str, ...], Texts()] = ()
    think: bool | None = None  # write a plan first; None: as the stage's configuration says
    system_prompt: str | None = None  # what think mode puts first; None: the library's wording
    max_tokens: int = 1000  # of the text, its begin marker included
    temperature: float = 0.0  # of the text; 0 takes the likeliest token
    top_k: int = 0  # draws among so many likeliest tokens of the text; 0 and -1: among all
    top_p: float = 1.0  # and among the likeliest that have this probability together
    repetition_penalty: float = 1.0  # makes tokens of the prompt and the text less likely, above 1
    logprobs: int | None = None
    return_hidden_states: Keep | None = None  # of all tokens of the cache, or of the last one
    transfer_hidden_states: bool = False  # send those of all tokens to the next stage
    stream: bool = False  # report tokens and denoising steps while the request runs
    preview_interval: int = 0  # a preview after so many denoising steps, and the last; 0: none

    @property
    def is_text_only(self) -> bool:
        """Whether the answer is a text, and no image is made."""
        return self.modalities == ("text",)

    def thinks(self, default: bool = False) -> bool:
        """Whether a plan is written first; `default` is the stage's setting."""
        if self.think is not None:
            return self.think
        return default or ("text" in self.modalities and not self.is_text_only)


TEXT_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TextSamplingParams)}


def check_text_params(params: TextSamplingParams) -> None:
    """Bring `modalities` to its normal form; SchemaError names a param that is out of its range."""
    named = tuple(dict.fromkeys(params.modalities))
    params.modalities = () if named == ("image",) else named
    if unknown := [name for name in named if name not in MODALITIES]:
        raise SchemaError(f"modalities {unknown}; there are {', '.join(MODALITIES)}")
    if params.is_text_only and params.transfer_hidden_states:
        raise SchemaError("transfer_hidden_states: no other stage runs for modalities ('text',)")
    if params.think is False and "text" in named and not params.is_text_only:
        raise SchemaError(f"modalities {named}: the text is what think mode writes; leave think")
    if params.top_k < -1:
        raise SchemaError(f"top_k {params.top_k!r}: a number of tokens, or 0 for all")
    if not (params.temperature >= 0 and 0 < params.top_p <= 1 and params.repetition_penalty > 0):
        raise SchemaError(
            f"temperature {params.temperature}, top_p {params.top_p}, repetition_penalty "
            f"{params.repetition_penalty}: from 0, above 0 up to 1, and above 0"
        )
    if params.preview_interval < 0:
        raise SchemaError(f"preview_interval {params.preview_interval!r}: a number of steps, or 0")
    if params.logprobs is not None and params.logprobs < -1:
        raise SchemaError(f"logprobs {params.logprobs!r}: a number of tokens, or -1 for all")
