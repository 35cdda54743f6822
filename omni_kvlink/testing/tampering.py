"""`TamperingCopier`: changes payloads behind their digests, as a fault of the transport would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.copier import TorchCopier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest, TensorSpec
    from omni_kvlink.payload.views import TensorView


class TamperingCopier(TorchCopier):
    """Computes true digests, then changes the payload with `tamper`."""

    def __init__(self) -> None:
        self.tamper: Callable[[Manifest, Region], None] = do_nothing

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region, **options: float
    ) -> list[str]:
        """Gather, then call `tamper`."""
        digests = super().gather(sources, manifest, region, **options)
        self.tamper(manifest, region)
        return digests


def do_nothing(manifest: Manifest, region: Region) -> None:
    """A change that changes nothing."""


def _named(
    manifest: Manifest, region: Region, *names: str
) -> Iterator[tuple[TensorSpec, memoryview]]:
    """The tensors of some names and their bytes; a layer of a stream has only some of them."""
    for spec in manifest.tensors:
        if spec.name in names:
            start = manifest.header_nbytes + spec.start
            yield spec, region.view()[start : start + spec.nbytes]


def flip_bit(name: str, offset: int, manifest: Manifest, region: Region) -> None:
    """Flip a bit of one byte of one tensor."""
    for _, content in _named(manifest, region, name):
        content[offset] ^= 0x10


def swap_tokens(names: Sequence[str], manifest: Manifest, region: Region) -> None:
    """Swap the first two tokens in each tensor: sums of bytes stay the same."""
    for spec, content in _named(manifest, region, *names):
        row = spec.nbytes // spec.shape[0]
        content[: 2 * row] = bytes(content[row : 2 * row]) + bytes(content[:row])


def swap_tensors(first: str, second: str, manifest: Manifest, region: Region) -> None:
    """Swap two tensors."""
    (_, a), (_, b) = _named(manifest, region, first, second)
    a[:], b[:] = bytes(b), bytes(a)
