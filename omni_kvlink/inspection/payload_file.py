"""`PayloadFile`: a payload's .safetensors file, mapped; its header is checked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from omni_kvlink.errors import IntegrityError
from omni_kvlink.inspection.header_fault import header_fault
from omni_kvlink.payload.header import Header
from omni_kvlink.payload.safetensors_file import open_file

if TYPE_CHECKING:
    from omni_kvlink.inspection.tensor_byte import TensorByte
    from omni_kvlink.payload.branches import Branch
    from omni_kvlink.payload.header import TensorSpec


class PayloadFile:
    """A file as `save` and `record` write it.

    FileError, WireError, VersionError, and IntegrityError if its header cannot be read; the last
    one names the bit, if one was flipped. Digests of the tensors are not checked here.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            self.manifest, self.region = open_file(self.path, map_it=True)
        except IntegrityError as error:
            texts = filter(None, (self.path, str(error), header_fault(self.path)))
            raise IntegrityError(": ".join(texts)) from None
        self._view = self.region.view()
        self._tensors = {spec.name: spec for spec in self.manifest.tensors}

    @property
    def version(self) -> str:
        """The version of the format."""
        manifest = self.manifest
        header = Header(bytes(self._view[8 : manifest.header_nbytes]), manifest.nbytes)
        return ".".join(map(str, header.note.version))

    def tensor(self, name: str) -> TensorSpec | None:
        """The tensor of this name in the header, if there is one."""
        return self._tensors.get(name)

    def bytes_of(self, spec: TensorSpec) -> memoryview:
        """The bytes of a tensor, or of rows of one."""
        start = self.manifest.header_nbytes
        return self._view[start + spec.start : start + spec.stop]

    def offset_of(self, byte: TensorByte) -> int:
        """The byte's offset from the start of the file."""
        return self.manifest.header_nbytes + byte.spec.start + byte.offset

    def nbytes_of(self, branch: Branch) -> int:
        """Bytes of the tensors that a branch has of its own."""
        return sum(spec.nbytes for spec in self.manifest.tensors_of(branch))

    def to_dict(self) -> dict[str, Any]:
        """The content of the header as JSON values."""
        manifest = self.manifest
        return {
            "file": self.path,
            "kind": manifest.kind,
            "request_id": manifest.request_id,
            "version": self.version,
            "producer": manifest.producer,
            "nbytes": manifest.nbytes,
            "header_nbytes": manifest.header_nbytes,
            "digests": "crc32c" if manifest.has_digests else "off",
            "branches": [
                {**msgspec.to_builtins(branch), "nbytes": self.nbytes_of(branch)}
                for branch in manifest.branches
            ],
            "tensors": [msgspec.to_builtins(spec) for spec in manifest.tensors],
        }
