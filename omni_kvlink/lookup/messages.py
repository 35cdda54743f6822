"""The messages of a lookup; each is the metadata of a payload of a link.

A producer puts its `LookupHello` into its own link, for every consumer. A consumer puts a
`Question` into its own link, under the key that the hello names; the answer comes by the producer's
link, under the key that the question names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.lookup.tokens import DIGEST_SIZE, NO_NAMESPACE, SIZE
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.tensor_data import TensorTransferData

if TYPE_CHECKING:
    from omni_kvlink.link import Payload
    from omni_kvlink.lookup.match import Match
    from omni_kvlink.payload.bundle import BundleBranch

HELLO = "lookup/hello"
KV, HIDDEN, TOKENS = "kv", "hidden", "tokens"

T = TypeVar("T", bound=msgspec.Struct)


class LookupHello(msgspec.Struct, frozen=True):
    """A producer's introduction: the key of questions to it, and what made its K and V.

    `namespaces`: it reads a question's namespace; one of an earlier version would ignore it.
    """

    inbox: str
    model: str
    namespaces: bool = False


class Question(msgspec.Struct, frozen=True):
    """A `select` of another process, which waits `timeout` seconds for the key `answer`.

    With `wait`, the answer comes only once all tokens are in the store; with `probe`, it is the
    number of tokens without their K and V. `namespace` is the hexadecimal digest of the prompt's
    namespace, "" for none.
    """

    answer: str
    timeout: float
    wait: bool = False
    probe: bool = False
    namespace: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""


class Found(msgspec.Struct, frozen=True):
    """The answer to a probe."""

    tokens: int


def message_payload(key: str, message: msgspec.Struct, prompt: bytes = b"") -> TensorTransferData:
    """A message, and the tokens of the encoded prompt that a question is about."""
    tokens = {TOKENS: torch.tensor(list(prompt[DIGEST_SIZE:]), dtype=torch.uint8)} if prompt else {}
    return TensorTransferData(key, tokens, msgspec.to_builtins(message))


def namespace_of(prompt: bytes) -> str:
    """The namespace of an encoded prompt, as a question has it."""
    digest = prompt[:DIGEST_SIZE]
    return "" if digest == NO_NAMESPACE else digest.hex()


def answer_payload(key: str, match: Match) -> KVCacheBundle | TensorTransferData:
    """A match to be sent; it shares the match's tensors."""
    if match.data is None:
        return message_payload(key, Found(0))
    cache = match.data
    branches: dict[str, BundleBranch]
    branches = {KV: KVCacheTransferData(key, cache.layer_blocks, (), cache.metadata)}
    if match.hidden is not None:
        branches[HIDDEN] = TensorTransferData(key, {HIDDEN: match.hidden})
    return KVCacheBundle(key, branches)


def read_message(data: Payload, kind: type[T]) -> T:
    """The message in a payload; SchemaError if it is not of this kind."""
    try:
        return msgspec.convert(data.metadata if isinstance(data, TensorTransferData) else {}, kind)
    except msgspec.ValidationError as error:
        raise SchemaError(f"payload {data.request_id!r} is no {kind.__name__}: {error}") from None


def read_prompt(data: Payload, question: Question) -> bytes:
    """The encoded prompt of a question; SchemaError if there is none."""
    tokens = data.tensors()[0] if data.tensors() else None
    if not isinstance(tokens, torch.Tensor) or tokens.dtype != torch.uint8 or tokens.numel() % SIZE:
        raise SchemaError(f"payload {data.request_id!r} has no tokens")
    digest = bytes.fromhex(question.namespace) or NO_NAMESPACE
    return digest + bytes(tokens.flatten().tolist())


def read_answer(
    data: Payload, requested: int
) -> tuple[KVCacheTransferData | None, torch.Tensor | None]:
    """K and V, and the hidden state, of an answer; SchemaError if more than `requested` tokens."""
    if isinstance(data, TensorTransferData) and read_message(data, Found).tokens == 0:
        return None, None
    kv = data.branches.get(KV) if isinstance(data, KVCacheBundle) else None
    if not isinstance(data, KVCacheBundle) or not isinstance(kv, KVCacheTransferData):
        raise SchemaError(f"payload {data.request_id!r} is no answer")
    hidden, tokens = data.tensor_data.get(HIDDEN), kv.metadata.seq_len
    state = None if hidden is None else hidden.tree.get(HIDDEN)
    if tokens > requested or (tokens == requested) != isinstance(state, torch.Tensor):
        raise SchemaError(f"{tokens} tokens for a question about {requested}, hidden: {hidden!r}")
    return kv, state if isinstance(state, torch.Tensor) else None
