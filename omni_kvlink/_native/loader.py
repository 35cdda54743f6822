"""Loads a compiled library of the package once, or keeps the reason why it cannot be used."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

from omni_kvlink.errors import NativeError


@dataclasses.dataclass
class CompiledPart:
    """A shared library in the package's folder.

    Args:
        name: how errors call it, such as "CUDA part".
        filename: of the library. If the build fails, it writes why to a file of the same name with
            the suffix `.missing`.
        abi: the version of its interface that this package requires.
        cure: what to do if it is missing.
        declare: declares the functions' types to ctypes, and returns the interface's version;
            raises AttributeError if it is another library.
        loaded: the loaded library; None before the first `load`, and if it cannot be used.
    """

    name: str
    filename: str
    abi: int
    cure: str
    declare: Callable[[ctypes.CDLL], int]
    loaded: ctypes.CDLL | None = None
    _why: str | None = None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def load(self) -> ctypes.CDLL:
        """Return the library, or raise a NativeError of the same text at every call; any thread."""
        with self._lock:
            if self.loaded is None and self._why is None:
                try:
                    self.loaded = self.open(Path(__file__).parent)
                except NativeError as error:
                    self._why = str(error)  # the error itself would keep its callers' frames alive
            if self.loaded is None:
                raise NativeError(self._why)
            return self.loaded

    def missing(self) -> str | None:
        """Return why the library cannot be used, and what helps; None if it can."""
        try:
            self.load()
        except NativeError as error:
            return str(error)
        return None

    def open(self, directory: Path) -> ctypes.CDLL:
        """Load the library from a directory and check its version."""
        path = directory / self.filename
        excuse = path.with_suffix(".missing")
        try:
            if not path.exists():
                why = f"there is no {path.name} in it"
                why = excuse.read_text().strip() if excuse.exists() else why
                raise NativeError(f"omni_kvlink has no {self.name}: {why}; {self.cure}")
            library = ctypes.CDLL(str(path))
            version = self.declare(library)
        except (OSError, AttributeError) as error:
            raise NativeError(f"{path} cannot be used: {error}; {self.cure}") from None
        if version != self.abi:
            raise NativeError(
                f"{path} has interface {version}, this package requires {self.abi}; {self.cure}"
            )
        return library
