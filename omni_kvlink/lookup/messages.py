"""What the two sides of a lookup say to each other; each word is a payload of a link.

A producer's `LookupHello` lies in its own link for every consumer. A `Question` lies in the
consumer's link under the name that the hello gave; its answer comes by the producer's link,
under the name that the question gave.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.link import Payload
from omni_kvlink.lookup.match import Match
from omni_kvlink.lookup.tokens import SIZE, count
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.metadata import KVMetadata
from omni_kvlink.payload.schema import KVCacheTransferData

HELLO = "lookup/hello"
KV, HIDDEN = "kv", "hidden"

T = TypeVar("T", bound=msgspec.Struct)


class LookupHello(msgspec.Struct, frozen=True):
    """Who produces: `inbox` is the key of questions to this one, `model` what made its K and V."""

    inbox: str
    model: str


class Question(msgspec.Struct, frozen=True):
    """`select` from afar.

    Args:
        answer: the key that the answer shall have.
        timeout: seconds for which somebody waits for it.
        wait: no answer before all tokens are there.
        probe: how many tokens, without their K and V.
    """

    answer: str
    timeout: float
    wait: bool = False
    probe: bool = False


class Found(msgspec.Struct, frozen=True):
    """The answer to a probe."""

    tokens: int


def say(key: str, word: msgspec.Struct) -> KVCacheTransferData:
    """A word without bytes."""
    return KVCacheTransferData(key, {"key_cache": [None], "value_cache": [None]}, (), _with(word))


def ask(key: str, question: Question, prompt: bytes) -> KVCacheTransferData:
    """A question, and the encoded tokens it is about."""
    tokens = torch.tensor(list(prompt), dtype=torch.uint8).view(-1, SIZE)
    metadata = _with(question, tokens=count(prompt), layout="ND")
    return KVCacheTransferData(key, {"latent_cache": [tokens]}, (), metadata)


def hear(data: Payload, kind: type[T]) -> T:
    """The word that a payload is.

    Raises:
        SchemaError: it is another one.
    """
    try:
        extra = data.metadata.extra if isinstance(data, KVCacheTransferData) else {}
        return msgspec.convert(extra, kind)
    except msgspec.ValidationError as error:
        raise SchemaError(f"payload {data.request_id!r} is no {kind.__name__}: {error}") from None


def prompt_of(data: Payload) -> bytes:
    """The encoded tokens of a question."""
    tokens = data.tensors()[0] if data.tensors() else None
    if not isinstance(tokens, torch.Tensor) or tokens.shape[1:] != (SIZE,):
        raise SchemaError(f"payload {data.request_id!r} has no tokens")
    return bytes(tokens.view(torch.uint8).flatten().tolist())


def answer(key: str, match: Match) -> KVCacheBundle:
    """A match on its way; borrows its tensors."""
    if match.data is None:
        return KVCacheBundle(key, {KV: say(key, Found(0))})
    own = match.data
    branches = {KV: KVCacheTransferData(key, own.layer_blocks, (), own.metadata)}
    if match.hidden is not None:
        metadata = KVMetadata((1,), (1,), 1, layout="ND")
        blocks = {"latent_cache": [match.hidden]}
        branches[HIDDEN] = KVCacheTransferData(key, blocks, (), metadata)
    return KVCacheBundle(key, branches)


def match_of(data: Payload, asked: int) -> tuple[KVCacheTransferData | None, torch.Tensor | None]:
    """K, V and hidden state of an answer.

    Raises:
        SchemaError: it cannot be the answer to a question about `asked` tokens.
    """
    branches = data.branches if isinstance(data, KVCacheBundle) else {}
    kv, hidden = branches.get(KV), branches.get(HIDDEN)
    if not isinstance(kv, KVCacheTransferData):
        raise SchemaError(f"payload {data.request_id!r} is no answer")
    state = hidden.tensors()[0] if isinstance(hidden, KVCacheTransferData) else None
    found = kv.metadata.seq_len
    if found > asked or (found == asked) != isinstance(state, torch.Tensor):
        raise SchemaError(f"{found} tokens for a question about {asked}, hidden: {hidden!r}")
    return None if kv.is_empty else kv, state if isinstance(state, torch.Tensor) else None


def _with(word: msgspec.Struct, tokens: int = 0, layout: str = "NHD") -> KVMetadata:
    extra: dict[str, Any] = msgspec.to_builtins(word)
    return KVMetadata((tokens,), (tokens,), 1, layout=layout, extra=extra)
