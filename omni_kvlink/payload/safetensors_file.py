"""Payloads as .safetensors files: the same bytes that cross between processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import TYPE_CHECKING

from omni_kvlink.errors import FileError, IntegrityError, SchemaError, WireError
from omni_kvlink.memory.mapping import STEP, Mapping, check_available
from omni_kvlink.payload.digests import tensor_digest, verify
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.tensor_memory import readable, tensor_views
from omni_kvlink.payload.views import Views, aliases, check_view_fits
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO

    from omni_kvlink.memory.region import Region


def write_file(path: str | os.PathLike[str], plan: Manifest, views: Views) -> None:
    """Write a payload; the file appears whole under its name, or an old one stays as it was."""
    with _new_file(path, plan.nbytes) as region:
        _copy(views, plan, region)
        digests = [tensor_digest(plan, region, spec).text() for spec in plan.tensors]
        region.view()[: plan.header_nbytes] = plan.encode(digests)


def write_payload(path: str | os.PathLike[str], payload: memoryview) -> None:
    """Write the bytes of a payload as they are; the file appears as that of `write_file` does."""
    with _new_file(path, payload.nbytes) as region:
        region.write(0, payload)


def write_kept(path: str | os.PathLike[str], manifest: Manifest, payload: memoryview) -> None:
    """Write a payload as `write_payload` does, but with zeros for what its padding holds.

    So a file has no byte that its digests do not cover; `check_padding` says whether one changed.
    """
    start = manifest.header_nbytes
    spans = [(0, start), *((start + spec.start, start + spec.stop) for spec in manifest.tensors)]
    with _new_file(path, manifest.nbytes) as region:
        for first, last in spans:
            region.write(first, payload[first:last])


def check_padding(manifest: Manifest, region: Region) -> None:
    """Raise IntegrityError if the padding of a payload that `write_kept` wrote is not zero."""
    offset, start = 0, manifest.header_nbytes
    for spec in manifest.tensors:
        if any(region.view(start + offset, start + spec.start)):
            raise IntegrityError(f"the padding before {spec.where()} is not zero")
        offset = spec.stop


def open_file(path: str | os.PathLike[str], *, map_it: bool) -> tuple[Manifest, Region]:
    """Read a file into memory of its own, or map it, and validate its header; not its digests."""
    with translate_errors(os.fspath(path), "load another path", FileError):
        memory = _read(path, map_it=map_it)
    region = Mapping(memory, len(memory), readonly=map_it).region
    return Manifest.decode(region.view()), region


def read_file(path: str | os.PathLike[str], kind: str, *, map_it: bool) -> tuple[Manifest, Region]:
    """Do what `open_file` does, and check the `Manifest.kind` and every digest.

    They are checked in the memory that is returned.
    """
    manifest, region = open_file(path, map_it=map_it)
    if manifest.kind != kind:
        raise SchemaError(
            f"{os.fspath(path)} holds a {manifest.kind}: {manifest.kind}.load reads it"
        )
    verify(manifest, region)
    return manifest, region


@contextlib.contextmanager
def _new_file(path: str | os.PathLike[str], nbytes: int) -> Iterator[Region]:
    """Memory of a new file, which gets its name at the end of the block, or is removed."""
    draft = f"{os.fspath(path)}.{os.getpid()}-{threading.get_ident()}.part"
    with translate_errors(os.fspath(path), "save to another path", FileError):
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(fd, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                memory = mmap.mmap(file.fileno(), nbytes)
                yield Mapping(memory, nbytes).region
                memory.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the directory was removed
                os.unlink(draft)
            raise


def _read(path: str | os.PathLike[str], *, map_it: bool) -> mmap.mmap:
    with open(path, "rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes < 8:
            raise WireError(f"{os.fspath(path)} has {nbytes} bytes: no payload")
        if map_it:
            return mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
        return _copy_of(file, nbytes)


def _copy_of(file: FileIO, nbytes: int) -> mmap.mmap:
    check_available(nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view, done = memoryview(memory), 0
    while done < nbytes:
        count = file.readinto(view[done : done + STEP])
        if not count:
            raise WireError(f"{os.fspath(file.name)} became shorter while it was read")
        done += count
    return memory


def _copy(views: Views, manifest: Manifest, region: Region) -> None:
    targets = tensor_views(region, manifest.tensors, manifest.header_nbytes)
    for view, spec, target in zip(aliases(views), manifest.tensors, targets, strict=True):
        check_view_fits(view, spec)
        if isinstance(view, PagedTensor):
            for _ in view.read(target):
                pass
        else:
            target.copy_(readable(view, spec.where))
