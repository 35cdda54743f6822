"""A compiled part of the package: found, looked at and loaded once, or the one reason why not."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

from omni_kvlink.errors import NativeError


class CompiledPart:
    """A shared library beside the package's files.

    Args:
        name: in the words of an error, such as "CUDA part".
        library: the file; `excuse`: what the build wrote in its stead, why there is none.
        abi: the version of its interface that this package wants.
        cure: what helps if it is missing.
        declare: tells ctypes what its functions give, and returns its version; AttributeError if
            it is another library.

    Attributes:
        state: the library, or why there is none; None until it is wanted.
    """

    def __init__(
        self,
        name: str,
        *,
        library: str,
        excuse: str,
        abi: int,
        cure: str,
        declare: Callable[[ctypes.CDLL], int],
    ):
        self._name, self._library, self._excuse = name, library, excuse
        self._cure, self._declare = cure, declare
        self._loading = threading.Lock()
        self.abi = abi
        self.state: ctypes.CDLL | NativeError | None = None

    def load(self) -> ctypes.CDLL:
        """The library; raises NativeError, the same each time."""
        if self.state is None:
            with self._loading:
                if self.state is None:
                    try:
                        self.state = self.open(Path(__file__).parent)
                    except NativeError as error:
                        self.state = error
        if isinstance(self.state, NativeError):
            raise NativeError(*self.state.args)
        return self.state

    def open(self, directory: Path) -> ctypes.CDLL:
        """The library that lies in a directory, if it is the right one."""
        path, excuse = directory / self._library, directory / self._excuse
        if not path.exists():
            why = (
                excuse.read_text().strip() if excuse.exists() else f"there is no {path.name} in it"
            )
            raise NativeError(f"omni_kvlink has no {self._name}: {why}; {self._cure}")
        try:
            library = ctypes.CDLL(str(path))
            version = self._declare(library)
        except (OSError, AttributeError) as error:
            raise NativeError(f"{path} cannot be used: {error}; {self._cure}") from None
        if version != self.abi:
            raise NativeError(
                f"{path} has interface {version}, this package wants {self.abi}; {self._cure}"
            )
        return library
