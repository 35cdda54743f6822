"""CRC-32C digests of a payload's tensors, one for each started MiB."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink._native.host import crc32c
from omni_kvlink.errors import IntegrityError, VersionError, WireError
from omni_kvlink.payload.format import DIGEST_CHUNK
from omni_kvlink.system.waits import NEVER, check_deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.layout_cache import LayoutCache
    from omni_kvlink.payload.manifest import Manifest, TensorSpec


class ChunkDigest:
    """The digests of a tensor's bytes in the payload, computed while they are being written.

    `crcs` are the CRC-32C of each chunk so far.
    """

    def __init__(self, data: memoryview):
        self._data, self._done = data, 0
        self.crcs: list[int] = []

    def advance(self, upto: int, deadline: float = NEVER) -> None:
        """Hash the chunks that are complete, now that the first `upto` bytes are final.

        TransferTimeout if the deadline (`time.monotonic`) passes before.
        """
        while upto - self._done >= DIGEST_CHUNK or upto == len(self._data) > self._done:
            stop = min(self._done + DIGEST_CHUNK, upto)
            self.crcs.append(crc32c(self._data[self._done : stop]))
            self._done = stop
            check_deadline(deadline, "computing its digests")

    def text(self) -> str:
        """The digests as `TensorSpec.digest` holds them: eight hexadecimal digits a chunk."""
        return "".join(f"{crc:08x}" for crc in self.crcs)


def tensor_digest(
    manifest: Manifest, region: Region, spec: TensorSpec, deadline: float = NEVER
) -> ChunkDigest:
    """The digests of a tensor that is in the payload; none where the manifest has none for it.

    TransferTimeout if the deadline (`time.monotonic`) passes before.
    """
    start = manifest.header_nbytes + spec.start
    digest = ChunkDigest(region.view(start, start + spec.nbytes))
    if spec.digest:
        digest.advance(spec.nbytes, deadline)
    return digest


def verify(manifest: Manifest, region: Region) -> None:
    """Check every digest of a payload; IntegrityError names the tensor and the first MiB."""
    for spec in manifest.tensors:
        if spec.digest:
            compare(spec, tensor_digest(manifest, region, spec).crcs)


def verified(payload: bytes | memoryview, region: Region, layouts: LayoutCache) -> Manifest | None:
    """The manifest of a payload that was copied to `region`; None if it is not as committed."""
    try:
        manifest = layouts.decode(payload)
        verify(manifest, region)
    except (WireError, VersionError):
        return None
    return manifest


def chunks_of(text: str) -> list[int]:
    """The CRC-32C of each chunk, from digests as `TensorSpec.digest` holds them."""
    return [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]


def compare(spec: TensorSpec, found: Sequence[int]) -> None:
    """Raise `mismatch` for the first chunk whose digest is not the committed one."""
    for chunk, (committed, crc) in enumerate(zip(chunks_of(spec.digest), found, strict=True)):
        if committed != crc:
            raise mismatch(spec, chunk)


def mismatch(spec: TensorSpec, chunk: int) -> IntegrityError:
    """The error for a chunk whose digest is not the committed one; names tensor and MiB."""
    return IntegrityError(
        f"{spec.where()}: the bytes from {chunk * DIGEST_CHUNK} on are not those committed "
        f"(MiB {chunk} of {len(spec.digest) // 8})"
    )
