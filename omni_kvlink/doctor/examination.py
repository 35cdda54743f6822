"""Examines all areas, or those that were asked for, into one report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.doctor import (
    configuration,
    copiers,
    gpu,
    keys,
    link_probe,
    memory,
    namespaces,
    packages,
    sockets,
)
from omni_kvlink.doctor.findings import Area
from omni_kvlink.doctor.report import HealthReport

if TYPE_CHECKING:
    from omni_kvlink.doctor.inquiry import Inquiry

_EXAMINERS = {
    "memory": memory.examine,
    "sockets": sockets.examine,
    "copier": copiers.examine,
    "gpu": gpu.examine,
    "packages": packages.examine,
    "keys": keys.examine,
    "namespaces": namespaces.examine,
    "configuration": configuration.examine,
    "links": link_probe.examine,
}
"""The areas in the order of the report, and who examines each."""


def examine(inquiry: Inquiry) -> HealthReport:
    """Examine the areas; blocks for the timeout and the seconds of each URL."""
    areas = list[Area]()
    for name, examiner in _EXAMINERS.items():
        if name in (inquiry.areas or _EXAMINERS):
            areas.append(Area(name))
            examiner(areas[-1], inquiry)
    return HealthReport.of([finding for area in areas for finding in area.findings])
