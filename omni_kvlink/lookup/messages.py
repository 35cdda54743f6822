"""The messages of a lookup; each is a payload of a link.

A producer puts its `LookupHello` into its own link, for every consumer. A consumer puts a
`Question` into its own link, under the key that the hello names; the answer comes by the producer's
link, under the key that the question names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.lookup.tokens import SIZE, count
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.schema import KVCacheTransferData, KVMetadata

if TYPE_CHECKING:
    from omni_kvlink.link import Payload
    from omni_kvlink.lookup.match import Match

HELLO = "lookup/hello"
KV, HIDDEN = "kv", "hidden"

T = TypeVar("T", bound=msgspec.Struct)


class LookupHello(msgspec.Struct, frozen=True):
    """A producer's introduction.

    Args:
        inbox: the key of questions to it.
        model: what made its K and V.
    """

    inbox: str
    model: str


class Question(msgspec.Struct, frozen=True):
    """A `select` of another process.

    Args:
        answer: the key of the answer.
        timeout: seconds for which the consumer waits for it.
        wait: answer only once all tokens are in the store.
        probe: answer with the number of tokens, without their K and V.
    """

    answer: str
    timeout: float
    wait: bool = False
    probe: bool = False


class Found(msgspec.Struct, frozen=True):
    """The answer to a probe."""

    tokens: int


def message_payload(key: str, message: msgspec.Struct) -> KVCacheTransferData:
    """A message without tensors."""
    metadata = _metadata(message)
    return KVCacheTransferData(key, {"key_cache": [None], "value_cache": [None]}, (), metadata)


def question_payload(key: str, question: Question, prompt: bytes) -> KVCacheTransferData:
    """A question, and the encoded tokens that it is about."""
    tokens = torch.tensor(list(prompt), dtype=torch.uint8).view(-1, SIZE)
    metadata = _metadata(question, tokens=count(prompt), layout="ND")
    return KVCacheTransferData(key, {"latent_cache": [tokens]}, (), metadata)


def answer_payload(key: str, match: Match) -> KVCacheBundle:
    """A match to be sent; it shares the match's tensors."""
    if match.data is None:
        return KVCacheBundle(key, {KV: message_payload(key, Found(0))})
    own = match.data
    branches = {KV: KVCacheTransferData(key, own.layer_blocks, (), own.metadata)}
    if match.hidden is not None:
        metadata = KVMetadata((1,), (1,), 1, layout="ND")
        blocks = {"latent_cache": [match.hidden]}
        branches[HIDDEN] = KVCacheTransferData(key, blocks, (), metadata)
    return KVCacheBundle(key, branches)


def read_message(data: Payload, kind: type[T]) -> T:
    """The message in a payload.

    Raises:
        SchemaError: it is not of this kind.
    """
    try:
        extra = data.metadata.extra if isinstance(data, KVCacheTransferData) else {}
        return msgspec.convert(extra, kind)
    except msgspec.ValidationError as error:
        raise SchemaError(f"payload {data.request_id!r} is no {kind.__name__}: {error}") from None


def read_prompt(data: Payload) -> bytes:
    """The encoded tokens of a question; SchemaError if there are none."""
    tokens = data.tensors()[0] if data.tensors() else None
    if not isinstance(tokens, torch.Tensor) or tokens.shape[1:] != (SIZE,):
        raise SchemaError(f"payload {data.request_id!r} has no tokens")
    return bytes(tokens.view(torch.uint8).flatten().tolist())


def read_answer(
    data: Payload, requested: int
) -> tuple[KVCacheTransferData | None, torch.Tensor | None]:
    """K and V, and the hidden state, of an answer.

    Raises:
        SchemaError: it cannot be the answer to a question about `requested` tokens.
    """
    branches = data.branches if isinstance(data, KVCacheBundle) else {}
    kv, hidden = branches.get(KV), branches.get(HIDDEN)
    if not isinstance(kv, KVCacheTransferData):
        raise SchemaError(f"payload {data.request_id!r} is no answer")
    state = hidden.tensors()[0] if isinstance(hidden, KVCacheTransferData) else None
    found = kv.metadata.seq_len
    if found > requested or (found == requested) != isinstance(state, torch.Tensor):
        raise SchemaError(f"{found} tokens for a question about {requested}, hidden: {hidden!r}")
    return None if kv.is_empty else kv, state if isinstance(state, torch.Tensor) else None


def _metadata(message: msgspec.Struct, tokens: int = 0, layout: str = "NHD") -> KVMetadata:
    extra: dict[str, Any] = msgspec.to_builtins(message)
    return KVMetadata((tokens,), (tokens,), 1, layout=layout, extra=extra)
