"""Payloads as .safetensors files: the same bytes that cross between processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import TYPE_CHECKING

import torch

from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.memory.region import Mapping, Region
from omni_kvlink.payload.digests import tensor_digest, verify
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.views import TensorView, dtype_code, tensor_views

if TYPE_CHECKING:
    from collections.abc import Sequence


def write_file(path: str | os.PathLike[str], plan: Manifest, views: Sequence[TensorView]) -> None:
    """Write a payload; the file appears whole under its name, or an old one stays as it was."""
    draft = f"{os.fspath(path)}.{os.getpid()}-{threading.get_ident()}.part"
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, plan.nbytes)
            memory = mmap.mmap(file.fileno(), plan.nbytes)
            region = Mapping(memory, plan.nbytes).region
            _copy(views, plan, region)
            digests = [tensor_digest(plan, region, spec).text() for spec in plan.tensors]
            region.view()[: plan.header_nbytes] = plan.with_digests(digests).encode()
            memory.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise


def map_file(path: str | os.PathLike[str], kind: str) -> tuple[Manifest, Region]:
    """Map a file readonly, validate its header, its `Manifest.kind` and every digest."""
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes < 8:
            raise WireError(f"{os.fspath(path)} has {nbytes} bytes: no payload")
        memory = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
    region = Mapping(memory, nbytes, readonly=True).region
    manifest = Manifest.decode(region.view())
    if manifest.kind != kind:
        raise SchemaError(
            f"{os.fspath(path)} holds a {manifest.kind}: {manifest.kind}.load reads it"
        )
    verify(manifest, region)
    return manifest, region


def _copy(views: Sequence[TensorView], manifest: Manifest, region: Region) -> None:
    targets = tensor_views(region, manifest.tensors, manifest.header_nbytes)
    for view, spec, target in zip(views, manifest.tensors, targets, strict=True):
        if view.device.type == "meta":
            raise SchemaError(f"{spec.where()} has no bytes: it is a plan, made by blank()")
        if tuple(view.shape) != spec.shape or dtype_code(view.dtype) != spec.dtype:
            raise SchemaError(
                f"{spec.where()}: {view.dtype} {list(view.shape)}, "
                f"the manifest says {spec.dtype} {list(spec.shape)}"
            )
        if isinstance(view, PagedTensor):
            for _ in view.read(target):
                pass
        elif isinstance(view, torch.Tensor):
            target.copy_(view.detach())
