"""Loads a compiled library of the package once, or keeps the reason why it cannot be used."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from omni_kvlink.errors import NativeError

if TYPE_CHECKING:
    from collections.abc import Callable


class CompiledPart:
    """A shared library in the package's folder.

    Args:
        name: how errors call it, such as "CUDA part".
        filename: the library's file.
        excuse: the file that the build writes if it cannot build the library: why.
        abi: the version of its interface that this package requires.
        cure: what to do if it is missing.
        declare: declares the functions' types to ctypes, and returns the interface's version;
            raises AttributeError if it is another library.

    Attributes:
        loaded: the loaded library; None before the first `load`, and if it cannot be used.
        error: why it cannot be used, once `load` has found that out.
    """

    def __init__(
        self,
        name: str,
        *,
        filename: str,
        excuse: str,
        abi: int,
        cure: str,
        declare: Callable[[ctypes.CDLL], int],
    ):
        self._name, self._filename, self._excuse = name, filename, excuse
        self._cure, self._declare = cure, declare
        self._lock = threading.Lock()
        self.abi = abi
        self.loaded: ctypes.CDLL | None = None
        self.error: NativeError | None = None

    def load(self) -> ctypes.CDLL:
        """Return the library, loading it at the first call; any thread.

        Raises:
            NativeError: it cannot be used; the same error at every call.
        """
        with self._lock:
            if self.loaded is None and self.error is None:
                try:
                    self.loaded = self.open(Path(__file__).parent)
                except NativeError as error:
                    self.error = error
            if self.loaded is None:
                assert self.error
                raise NativeError(*self.error.args)
            return self.loaded

    def open(self, directory: Path) -> ctypes.CDLL:
        """Load the library from a directory and check its version."""
        path, excuse = directory / self._filename, directory / self._excuse
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
                f"{path} has interface {version}, this package requires {self.abi}; {self._cure}"
            )
        return library
