"""The address of `kvlink-bench serve`, `tcp://HOST:PORT/TOKEN`."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple

TOKEN_VARIABLE = "KVLINK_BENCH_TOKEN"
_FORM = re.compile(r"tcp://([\w.-]+):(\d{1,5})(?:/(\w+))?")


class RemoteAddress(NamedTuple):
    """An interface's address and port; a connection whose first line is not the token is closed."""

    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        """The text of the address."""
        return f"tcp://{self.host}:{self.port}/{self.token}"


def read_address(text: str) -> RemoteAddress:
    """Read an address; the token may be empty. ValueError."""
    match = _FORM.fullmatch(text)
    if not match or int(match[2]) > 65535:
        raise ValueError(f"wanted tcp://HOST:PORT, got {text!r}")
    return RemoteAddress(match[1], int(match[2]), match[3] or "")


def served_url(text: str) -> str:
    """The type of an argument that takes the address to listen at."""
    try:
        read_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def connected_url(text: str) -> str:
    """The type of an option that takes the address which `serve` has printed."""
    if not read_address(served_url(text)).token:
        raise argparse.ArgumentTypeError(
            f"wanted tcp://HOST:PORT/TOKEN, as kvlink-bench serve prints it, got {text!r}"
        )
    return text
