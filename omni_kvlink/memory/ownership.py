"""Ownership, from taking to release, that an exception of a signal handler cannot lose.

Such an exception comes in the main thread, wherever a Python function begins, a call of C returns
or a loop repeats. So nothing is owned by a value that is on its way from a call to a variable:

- What the library takes from itself (memory, a key) is written into its owner in the same
  assignment that takes it. The owner exists before: `ArenaPool.reserve(nbytes, owner)`.
- What the system gives as a number, such as a descriptor, is appended to a list by `take`.
- What is released when an object is freed is released by a `Finalizer`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def take(into: list[T], function: Callable[..., T], *arguments: object) -> T:
    """Append what a function of C returns to `into`, in one step; return it.

    The caller has `into` before, and releases what it has then after any exception.
    """
    into.extend(map(function, *[(argument,) for argument in arguments]))
    return into[-1]


def closer(descriptors: list[Any]) -> Callable[[], object]:
    """Return a function that closes the descriptors of a list, each once, and empties it.

    No signal handler runs in between. The list gets a None as its first element here.
    """
    descriptors.insert(0, None)  # `iter` ends at it
    return partial(deque, map(os.close, iter(descriptors.pop, None)), 0)


def call_if_alive(method: weakref.WeakMethod[Any], *arguments: object) -> None:
    """Call a method, if its object still lives."""
    bound = method()
    if bound is not None:
        bound(*arguments)


class Finalizer(weakref.ref[Any]):
    """Calls `end` once, when its object was freed or, by `run`, before; not at exit.

    Unlike a `weakref.finalize` or a `__del__`, it loses no call to a signal handler's exception,
    which Python ignores there. After one, `end` is called again: it may run twice. It runs in any
    thread, and must neither block nor take a lock.
    """

    __slots__ = ("is_alive",)

    is_alive: bool
    """Whether `end` has not been called."""
    # Here, since a module's names are gone at exit.
    _alive: ClassVar[dict[int, _SecondCall]] = {}

    def end(self) -> None:
        """Release what the object had."""
        raise NotImplementedError

    def begin(self, owner: object) -> None:
        """Watch `owner`, the object that this was made of, from now on."""
        second = _SecondCall(owner, _SecondCall.run)
        second.first = self
        self.is_alive = True
        self._alive[id(self)] = second

    def run(self) -> None:
        """Call `end` now; a second call does nothing."""
        was_alive = False
        try:
            was_alive, self.is_alive = self.is_alive, False
            if was_alive:
                self.end()
        except BaseException:
            if was_alive:
                self.end()
            raise
        finally:
            self._alive.pop(id(self), None)

    def detach(self) -> bool:
        """Leave the release to the caller; False if it was done."""
        was_alive, self.is_alive = self.is_alive, False
        self._alive.pop(id(self), None)
        return was_alive


class _SecondCall(weakref.ref[Any]):
    """Runs a finalizer whose own call was interrupted before its first line."""

    __slots__ = ("first",)
    first: Finalizer

    def run(self) -> None:
        if self.first.is_alive:
            self.first.run()


class CallAtEnd(Finalizer):
    """Calls a function when an object was freed; see `Finalizer`."""

    __slots__ = ("_function",)
    _function: Callable[[], object]

    @classmethod
    def of(cls, owner: object, function: Callable[[], object]) -> CallAtEnd:
        """Return a new one; `function` must not refer to `owner`."""
        call = cls(owner, cls.run)
        call._function = function
        call.begin(owner)
        return call

    def end(self) -> None:
        """Call the function."""
        self._function()
