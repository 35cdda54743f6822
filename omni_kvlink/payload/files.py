"""Payloads as .safetensors files: the same bytes that cross between processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

from omni_kvlink.copier import fastest_copier
from omni_kvlink.errors import WireError
from omni_kvlink.memory.region import Mapping
from omni_kvlink.payload.bundle import Payload
from omni_kvlink.payload.bundle import open_payload as open_payload
from omni_kvlink.payload.manifest import Manifest


def save(data: Payload, path: str | os.PathLike[str]) -> None:
    """Write the payload; the file appears whole under its name or not at all."""
    manifest = data.plan()
    draft = f"{os.fspath(path)}.{os.getpid()}-{threading.get_ident()}.part"
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, manifest.nbytes)
            pages = mmap.mmap(file.fileno(), manifest.nbytes)
            region = Mapping(pages, manifest.nbytes).region
            digests = fastest_copier().gather(data.tensors(), manifest, region)
            region.view()[: manifest.header_nbytes] = manifest.with_digests(digests).encode()
            pages.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise


def load(path: str | os.PathLike[str]) -> Payload:
    """Map a file, validate its header, check every digest."""
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes < 8:
            raise WireError(f"{os.fspath(path)} has {nbytes} bytes: no payload")
        pages = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
    region = Mapping(pages, nbytes, readonly=True).region
    manifest = Manifest.decode(region.view())
    fastest_copier().verify(manifest, region)
    return open_payload(manifest, region)
