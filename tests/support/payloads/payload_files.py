"""Payload files with one harmed byte, and hostile ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.payload.manifest import Manifest

if TYPE_CHECKING:
    from pathlib import Path

    from omni_kvlink.payload.bundle import Payload


def saved(data: Payload, path: Path) -> Manifest:
    """Save a payload; its manifest, as it is in the file."""
    data.save(path)
    return Manifest.decode(path.read_bytes())


def flip(path: Path, offset: int, bits: int) -> None:
    """Flip bits of one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))
