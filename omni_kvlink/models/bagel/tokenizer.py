"""Text to token ids and back, and the four ids that mark texts and images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INSTALL = "pip install 'omni_kvlink[bagel]'"

_MARKERS = {
    "bos": "<|im_start|>",
    "eos": "<|im_end|>",
    "start_of_image": "<|vision_start|>",
    "end_of_image": "<|vision_end|>",
}


class TokenizerMissingError(SchemaError, FileNotFoundError):
    """A checkpoint's `tokenizer.json` does not exist, or no longer does: restore it."""


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids of the markers around a text and around an image block."""

    bos: int
    eos: int
    start_of_image: int
    end_of_image: int

    @classmethod
    def load(cls, directory: str | Path) -> SpecialTokens:
        """Read them from `tokenizer.json`, without a tokenizer library.

        Raises `TokenizerMissingError` without that file, SchemaError if it has not all four.
        """
        raw = _read(Path(directory) / "tokenizer.json")
        try:
            added = msgspec.json.decode(raw, type=_TokenizerFile).added_tokens
        except msgspec.MsgspecError as error:
            raise SchemaError(f"tokenizer.json: {error}") from error
        ids = {token.content: token.id for token in added}
        missing = [content for content in _MARKERS.values() if content not in ids]
        if missing:
            raise SchemaError(f"tokenizer.json has no special token {', '.join(missing)}")
        return cls(**{name: ids[content] for name, content in _MARKERS.items()})


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken]


class BagelTokenizer:
    """`tokenizer.json` of a checkpoint, loaded at the first text.

    Loading it raises `TokenizerMissingError` without that file, and SchemaError if the tokenizers
    package cannot read it.
    """

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory) / "tokenizer.json"

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without markers."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, markers included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(f"reading text needs the tokenizers package: {INSTALL}") from error
        raw = _read(self._path)
        try:
            return Tokenizer.from_buffer(raw)
        except Exception as error:  # the package raises no narrower class
            raise SchemaError(f"{self._path}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TokenizerMissingError(
            f"no {path}: texts are read with it. Restore it from the checkpoint, or load the "
            "pipeline from a directory that has it"
        ) from error


def written_text(decoded: str) -> str:
    """Return the part of a decoded text between its first two markers."""
    body = decoded.split(_MARKERS["eos"])[0]
    return body.split(_MARKERS["bos"])[1]
