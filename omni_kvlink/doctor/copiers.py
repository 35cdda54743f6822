"""Examines which copier a link takes here, and why."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from omni_kvlink._native import cuda, host
from omni_kvlink.copier.select import fastest_copier

if TYPE_CHECKING:
    from omni_kvlink.doctor.findings import Area
    from omni_kvlink.doctor.inquiry import Inquiry


def examine(area: Area, inquiry: Inquiry) -> None:
    """Add the findings; loads the compiled library."""
    missing = host.missing()
    if missing is None:
        area.ok("compiled part", f"{host.LIBRARY}, interface {host.ABI}")
        by = f", set by {host.ENVIRONMENT}" if os.environ.get(host.ENVIRONMENT) else ""
        area.ok("instructions", f"{host.features()}{by}")
    else:
        area.failed("compiled part", missing)
    with warnings.catch_warnings(), area.guarded("copier"):
        warnings.simplefilter("ignore")  # the reason is the finding above
        name = fastest_copier().name
        reasons = {
            "pinned": f"the CUDA part, interface {cuda.ABI}, and a device are there",
            "native": "the compiled part is there; no CUDA device is in use",
            "torch": "there is no compiled part: the same bytes, more slowly",
        }
        area.ok("copier", f"{name}: {reasons[name]}")
