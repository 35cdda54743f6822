"""`Root`: the directory below which the kernel's files are read; another one in tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Root(NamedTuple):
    """The directory in which `proc` and `sys` lie. No call raises: what is not there is empty."""

    directory: str = "/"

    def text(self, name: str) -> str:
        """The content of a file such as "proc/meminfo", stripped; "" if it cannot be read."""
        try:
            return Path(self.directory, name).read_text().strip()
        except (OSError, ValueError):
            return ""

    def fields(self, name: str) -> dict[str, str]:
        """The lines `key: value` of a file."""
        pairs = (line.partition(":") for line in self.text(name).splitlines())
        return {key.strip(): value.strip() for key, _, value in pairs}

    def has(self, name: str) -> bool:
        """Whether there is a file or directory of this name."""
        return Path(self.directory, name).exists()

    def link(self, name: str) -> str:
        """The target of a symbolic link such as "proc/self/ns/net"; "" if there is none."""
        try:
            return os.readlink(Path(self.directory, name))
        except OSError:
            return ""
