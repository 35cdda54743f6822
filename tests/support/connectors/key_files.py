"""Key files for encrypted links."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.control.keys import generate

if TYPE_CHECKING:
    from pathlib import Path


class KeyFiles:
    """Key files of a producer, of an allowed reader, and of one that is not allowed."""

    def __init__(self, directory: Path):
        self.allowed = directory / "allowed"
        self.allowed.mkdir()
        for name in ("producer", "reader", "unknown"):
            generate(str(directory), name)
        shutil.copy(directory / "reader.public", self.allowed)
        self.directory = directory

    def key(self, name: str) -> str:
        return str(self.directory / name)

    @property
    def producer_options(self) -> dict[str, Any]:
        return {"keys": self.key("producer.secret"), "peers": str(self.allowed)}

    def consumer_options(
        self, consumer: str = "reader", producer: str = "producer"
    ) -> dict[str, Any]:
        return {"keys": self.key(f"{consumer}.secret"), "peers": self.key(f"{producer}.public")}
