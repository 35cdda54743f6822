"""Examines CUDA: the compiled part, the driver, the devices, and what reaches their memory."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import torch

from omni_kvlink._native import cuda

if TYPE_CHECKING:
    from omni_kvlink.doctor.findings import Area
    from omni_kvlink.doctor.inquiry import Inquiry
    from omni_kvlink.doctor.root import Root


def examine(area: Area, inquiry: Inquiry) -> None:
    """Add the findings; starts CUDA if torch has it."""
    root = inquiry.root
    driver = re.search(r"\d+\.\d+(\.\d+)?", root.text("proc/driver/nvidia/version"))
    count = torch.cuda.device_count() if torch.version.cuda else 0
    is_wanted = [link for link in inquiry.links() if link.options.device]
    if not count:
        _no_device(area, bool(driver), needed_by=is_wanted[0].url if is_wanted else "")
        return
    area.ok("driver", driver[0] if driver else "loaded")
    missing = cuda.missing() or cuda.no_device()
    if missing:
        area.failed("CUDA part", missing)
    else:
        area.ok("CUDA part", f"{cuda.LIBRARY}, interface {cuda.ABI}")
    for number in range(count):
        major, minor = torch.cuda.get_device_capability(number)
        name = torch.cuda.get_device_name(number)
        area.ok(f"cuda:{number}", f"{name}, compute capability {major}.{minor}")
    _peers(area, count)
    _direct(area, root)


def _no_device(area: Area, has_driver: bool, *, needed_by: str) -> None:
    """Say why there is none; wrong if a URL names one."""
    build = f"torch {torch.__version__} is built without CUDA"
    reason = "torch sees none" if torch.version.cuda else build
    text = f"no device: {reason}; the driver is {'loaded' if has_driver else 'not loaded'}"
    if needed_by:
        area.wrong("devices", f"{text}; {needed_by} needs one", cuda.DEVICE_CURE)
    else:
        area.note("devices", text)


def _peers(area: Area, count: int) -> None:
    pairs = list(itertools.permutations(range(count), 2))
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        names = ", ".join(f"cuda:{first} to cuda:{second}" for first, second in apart[:4])
        area.note("peer access", f"none from {names}: copies go over the host")
    elif pairs:
        area.ok("peer access", "each device reaches each other one")


def _direct(area: Area, root: Root) -> None:
    """Whether a network card can read the devices' memory."""
    if root.has("sys/module/nvidia_peermem"):
        area.ok("GPUDirect", "nvidia_peermem is loaded")
    elif root.text("proc/driver/nvidia/version").find("Open Kernel Module") >= 0:
        area.ok("GPUDirect", "the open kernel modules export DMA buffers")
    else:
        text = "no nvidia_peermem: ucx:// sends a device's memory over the host (`modprobe` it)"
        area.note("GPUDirect", text)
