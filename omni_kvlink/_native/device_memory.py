"""Memory of a CUDA device in which payloads lie: its mapping, and CRC-32C digests of it."""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from typing import TYPE_CHECKING

from omni_kvlink._native import cuda
from omni_kvlink.errors import NativeError
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.memory.region import Region

if TYPE_CHECKING:
    from collections.abc import Sequence


class DevicePages:
    """Owner of the regions of one allocation, which is freed with it; `device` is CUDA's number.

    Freeing may wait until the device has finished all of its work.
    """

    def __init__(self, device: int, nbytes: int):
        address = ctypes.c_void_p()
        cuda.call("kvlc_allocate", device, nbytes, ctypes.byref(address))
        self.device, self.address, self._pid = device, address.value or 0, os.getpid()
        weakref.finalize(self, _free, self.address, self._pid).atexit = False

    @property
    def is_lost(self) -> bool:
        """Whether this is a forked child, which has no CUDA."""
        return os.getpid() != self._pid

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy a few bytes to the host; blocks for that."""
        buffer = ctypes.create_string_buffer(nbytes)
        cuda.call("kvlc_read", self.device, address, buffer, nbytes)
        return buffer.raw

    def write(self, address: int, data: bytes) -> None:
        """Copy a few bytes to the device; blocks for that."""
        cuda.call("kvlc_write", self.device, address, data, len(data))


class DeviceMapping(Mapping):
    """`nbytes` of a CUDA device's memory, all of which is its `region`.

    Raises NativeError if there is no such device, or it has not so much memory left.
    """

    def __init__(self, device: int, nbytes: int):
        self.fd, self.nbytes = -1, nbytes
        pages = DevicePages(device, nbytes)
        self.region = Region(pages.address, nbytes, pages, device=f"cuda:{device}")


def number_of(device: str) -> int | None:
    """The number of a CUDA device's name, such as "cuda:0"; None of any other text."""
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" and number.isascii() and number.isdigit() else None


def crcs_of(region: Region, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the CRC-32C of the bytes from each start to its stop, computed by the region's device.

    Blocks until the device has done so, behind no work but that of other calls of this function.
    """
    device = number_of(region.device)
    if device is None:
        raise NativeError(f"no digests are computed on {region.device}")
    packed = array("Q")
    for start, stop in spans:
        packed.extend((region.address + start, stop - start))
    crcs = array("I", bytes(4 * len(spans)))
    addresses = [each.buffer_info()[0] if each else None for each in (packed, crcs)]
    cuda.call("kvlc_digest", device, addresses[0], len(spans), addresses[1])
    return crcs.tolist()


def _free(address: int, pid: int) -> None:
    """A finalizer: runs in any thread at any line, and takes none of this package's locks."""
    if pid == os.getpid():
        cuda.call("kvlc_free", address)
