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


Advanced: TypeAlias = tuple[BagelContext, Tensor]
"""The answer to a `NextToken`: the longer context, and the logits [vocab] of the token after."""

Steps: TypeAlias = Generator[NextToken | None, Advanced | None, T]
"""Yields None after a part of a prompt was read, or a `NextToken`, which is to be answered by
`send`. The generator's value is the result."""


def all_steps(
    of: Callable[Concatenate[Any, P], Steps[T]],
) -> Callable[Concatenate[Any, P], T]:
    """Turn a method that returns steps into one that runs them, and returns their result."""

    def method(self: Any, /, *arguments: P.args, **options: P.kwargs) -> T:
        return run_steps(of(self, *arguments, **options), self.advance)

    method.__doc__ = of.__doc__
    return method


def text_of_steps(
    of: Callable[Concatenate[Any, P], Steps[TextOutput]],
) -> Callable[Concatenate[Any, P], str]:
    """Turn a method that returns the steps of a text into one that returns the text."""
    run = all_steps(of)

    def method(self: Any, /, *arguments: P.args, **options: P.kwargs) -> str:
        return run(self, *arguments, **options).text

    method.__doc__ = of.__doc__
    return method


def run_steps(steps: Steps[T], advance: Callable[[list[NextToken]], list[Advanced]]) -> T:
    """Run the steps of one request to their end, its passes by `advance`; return the result."""
    answer: Advanced | None = None
    while True:
        try:
            text = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = None if text is None else advance([text])[0]
