"""Generators that read a prompt or write a text, one forward pass at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from torch import Tensor

from omni_kvlink.models.bagel.cache import BagelContext

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.text_output import TextOutput

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class NextToken:
    """A pass that a text waits for: `token` is to be read after `context`."""

    context: BagelContext
    token: int

    @property
    def token_ids(self) -> list[int]:
        """The token."""
        return [self.token]

    @property
    def num_tokens(self) -> int:
        """The number of tokens: 1."""
        return 1

    @property
    def num_computed_tokens(self) -> int:
        """The number of tokens before it."""
        return self.context.kv_lens[0]


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """A pass that a prompt waits for: a text, or the rest of one, is to be read after `context`.

    It may be read in several chunks, one after the other.
    """

    context: BagelContext
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        """The number of tokens to be read."""
        return len(self.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """The number of tokens before them."""
        return self.context.kv_lens[0]

    def chunk(self, num_tokens: int) -> PromptTokens:
        """The pass of the first `num_tokens` tokens."""
        return PromptTokens(self.context, self.token_ids[:num_tokens])

    def rest(self, num_tokens: int, answer: Advanced) -> PromptTokens:
        """The pass of the tokens after those, which `answer` is of."""
        return PromptTokens(answer[0], self.token_ids[num_tokens:])


TextPass: TypeAlias = NextToken | PromptTokens
"""A forward pass over tokens of one request's text."""

Advanced: TypeAlias = tuple[BagelContext, Tensor]
"""The answer to a pass: the longer context, and for a `NextToken` the logits [vocab] of the token
after, for `PromptTokens` the last hidden states [tokens, hidden]."""

Steps: TypeAlias = Generator[TextPass | None, Advanced | None, T]
"""Yields None before an image of a prompt is read, or a pass, which is to be answered by `send`.
The generator's value is the result."""


def all_steps(
    steps: Callable[Concatenate[Any, P], Steps[T]],
) -> Callable[Concatenate[Any, P], T]:
    """Turn a method that returns steps into one that runs them, and returns their result."""

    def method(self: Any, /, *arguments: P.args, **options: P.kwargs) -> T:
        return run_steps(steps(self, *arguments, **options), self.advance)

    method.__doc__ = steps.__doc__
    return method


def text_of_steps(
    steps: Callable[Concatenate[Any, P], Steps[TextOutput]],
) -> Callable[Concatenate[Any, P], str]:
    """Turn a method that returns the steps of a text into one that returns the text."""
    run = all_steps(steps)

    def method(self: Any, /, *arguments: P.args, **options: P.kwargs) -> str:
        return run(self, *arguments, **options).text

    method.__doc__ = steps.__doc__
    return method


def run_steps(steps: Steps[T], advance: Callable[[list[TextPass]], list[Advanced]]) -> T:
    """Run the steps of one request to their end, its passes by `advance`; return the result."""
    answer: Advanced | None = None
    while True:
        try:
            text = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = None if text is None else advance([text])[0]
