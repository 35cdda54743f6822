"""Futures that calls are answered with."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any


def settle(answer: Future[Any], call: Callable[[], Any]) -> None:
    """Do it, and answer with what it gives; what is a future itself answers when it has it."""
    try:
        value = call()
    except BaseException as error:
        answer.set_exception(error)
        return
    if isinstance(value, Future):
        value.add_done_callback(partial(_pass_on, answer))
    else:
        answer.set_result(value)


def _pass_on(answer: Future[Any], source: Future[Any]) -> None:
    error = source.exception()
    if error is None:
        answer.set_result(source.result())
    else:
        answer.set_exception(error)
