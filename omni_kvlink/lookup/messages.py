"""The messages of a lookup; each is the metadata of a payload of a link.

A producer puts its `LookupHello` into its own link, for every consumer. A consumer puts a
`Question` into its own link, under the key that the hello names; the answer comes by the producer's
link, under the key that the question names. It is a `Found`, which names the kept payload that the
consumer then gets; or it is K and V themselves, as a payload of `cached_prompt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.lookup.tokens import DIGEST_SIZE, NO_NAMESPACE, SIZE
from omni_kvlink.payload.tensor_data import TensorTransferData

if TYPE_CHECKING:
    from omni_kvlink.link import Payload

HELLO = "lookup/hello"
TOKENS = "tokens"
VERSION = 2
"""The version of these messages; those without one are of 1, where each answer was K and V."""

T = TypeVar("T", bound=msgspec.Struct)
Natural = Annotated[int, msgspec.Meta(ge=0)]


class LookupHello(msgspec.Struct, frozen=True):
    """A producer's introduction: the key of questions to it, and what made its K and V."""

    inbox: str
    model: str
    version: int = 1


class Question(msgspec.Struct, frozen=True):
    """A `select` of another process, which waits `timeout` seconds for the key `answer`.

    With `wait`, the answer comes only once all tokens are in the store. With `copy`, it is K and V
    if they are a part of a longer entry: the consumer would fetch all of it, and not map it.
    `namespace` is the hexadecimal digest of the prompt's namespace, "" for none.
    """

    answer: str
    timeout: float
    wait: bool = False
    copy: bool = False
    namespace: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    version: int = 1


class Found(msgspec.Struct, frozen=True):
    """The tokens of a prompt that a producer has: the first `tokens` tokens of `entry`.

    `entry` is the request id of a kept payload with `stored` tokens. Row `row` of its hidden states
    is that of the prompt's last token; None if that token must be computed.
    """

    tokens: Natural
    entry: str = ""
    stored: Natural = 0
    row: Natural | None = None

    @property
    def is_part(self) -> bool:
        """Whether the entry has more tokens than these and the last one, which is computed."""
        return 0 < self.tokens < self.stored - 1

    def check(self, requested: int) -> None:
        """Raise SchemaError if this is no answer to a question about so many tokens."""
        if self.tokens > requested or (self.tokens == requested) != (self.row is not None):
            raise SchemaError(f"{self} for a question about {requested} tokens")


def message_payload(key: str, message: msgspec.Struct, prompt: bytes = b"") -> TensorTransferData:
    """A message, and the tokens of the encoded prompt that a question is about."""
    tokens = {TOKENS: torch.tensor(list(prompt[DIGEST_SIZE:]), dtype=torch.uint8)} if prompt else {}
    return TensorTransferData(key, tokens, msgspec.to_builtins(message))


def namespace_of(prompt: bytes) -> str:
    """The namespace of an encoded prompt, as a question has it."""
    digest = prompt[:DIGEST_SIZE]
    return "" if digest == NO_NAMESPACE else digest.hex()


def other_version(version: int) -> str:
    """The text of an error about messages of another version."""
    return f"lookups of version {version}, here they are {VERSION}: install one omni_kvlink on both"


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


def read_found(data: Payload, requested: int) -> Found:
    """The `Found` about `requested` tokens in a payload; SchemaError if it is none."""
    hit = read_message(data, Found)
    hit.check(requested)
    return hit
