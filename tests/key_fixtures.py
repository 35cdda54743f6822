"""Keys for links that are encrypted."""

from __future__ import annotations

import shutil
from pathlib import Path

from omni_kvlink.connectors.control.keys import generate


class Safe:
    """Key files of a producer, of a reader that it knows, and of one that it does not."""

    def __init__(self, directory: Path):
        self.guests = directory / "guests"
        self.guests.mkdir()
        for name in ("producer", "reader", "stranger"):
            generate(str(directory), name)
        shutil.copy(directory / "reader.public", self.guests)
        self.directory = directory

    def key(self, name: str) -> str:
        return str(self.directory / name)

    @property
    def serving(self) -> dict[str, str]:
        return {"keys": self.key("producer.secret"), "peers": str(self.guests)}

    def reading(self, who: str = "reader", whom: str = "producer") -> dict[str, str]:
        return {"keys": self.key(f"{who}.secret"), "peers": self.key(f"{whom}.public")}
