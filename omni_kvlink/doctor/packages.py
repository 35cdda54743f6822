"""Examines packages: whether they are there, and whether this release knows their versions.

The versions are those of the package's own requirements, extras included, and of the tables of the
integrations.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from omni_kvlink.connectors import ucx
from omni_kvlink.integrations import vllm_omni
from omni_kvlink.integrations.vllm import versions

if TYPE_CHECKING:
    from omni_kvlink.doctor.findings import Area
    from omni_kvlink.doctor.inquiry import Inquiry

_REQUIRED = ("torch", "numpy", "msgspec", "pyzmq")
_HOSTS = ("transformers", "diffusers")
_ENGINES = {
    "vllm": (versions.TESTED, "docs/vllm.md"),
    "vllm-omni": (vllm_omni.TESTED, "docs/vllm_omni.md"),
}
_LANES = "cryptography"


def examine(area: Area, inquiry: Inquiry) -> None:
    """Add the findings; imports ucxx only if a URL asks for it."""
    for name in _REQUIRED:
        _minimum(area, name, is_required=True)
    if zmq.has("curve"):
        area.ok("CURVE", "ZMQ encrypts")
    else:
        cure = "pip install pyzmq from a wheel, or build libzmq with libsodium"
        area.wrong("CURVE", f"libzmq {zmq.zmq_version()} is built without encryption", cure)
    if not _minimum(area, _LANES):
        area.note(_LANES, "not installed: no encrypted lanes (pip install 'omni-kvlink[lanes]')")
    _ucx(area, inquiry)
    for name in _HOSTS:
        _minimum(area, name)
    for name, (tested, page) in _ENGINES.items():
        _tested(area, name, tested, page)


def installed(name: str) -> str:
    """The version of an installed distribution; "" if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def minimum_version(name: str) -> str:
    """The lowest version that this release supports, as its requirements say; "" if they do not."""
    try:
        requirements = metadata.requires("omni-kvlink") or []
    except metadata.PackageNotFoundError:  # the sources alone
        requirements = []
    for requirement in requirements:
        found = re.match(rf"{re.escape(name)}\s*>=\s*([0-9.]+)", requirement)
        if found:
            return found[1]
    return ""


def _minimum(area: Area, name: str, *, is_required: bool = False) -> bool:
    """Compare a package with its minimum; False if it is not installed."""
    version, least = installed(name), minimum_version(name)
    if not version:
        if is_required:
            area.wrong(name, "not installed", f"pip install '{name}>={least}'")
        return False
    if least and _numbers(version) < _numbers(least):
        area.wrong(name, f"{version} is older than {least}", f"pip install '{name}>={least}'")
    else:
        area.ok(name, f"{version}, {least} or later is supported" if least else version)
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, to compare it."""
    digits = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, digits[0].split("."))) if digits else ()


def _tested(area: Area, name: str, tested: tuple[str, ...], page: str) -> None:
    version, releases = installed(name), ", ".join(tested)
    if not version:
        return
    if versions.is_tested(version, tested):
        area.ok(name, f"{version}, tested with {releases}")
    else:
        cure = f"pip install '{name}=={tested[-1]}.*', or run the tests of {page} with yours"
        area.wrong(name, f"{version} is not known: tested with {releases}", cure)


def _ucx(area: Area, inquiry: Inquiry) -> None:
    """HealthReport ucxx; it is wrong if a URL needs it and it is missing."""
    needed_by = [link.url for link in inquiry.links() if link.scheme == "ucx"]
    if importlib.util.find_spec("ucxx") is None and not needed_by:
        area.note("ucxx", f"not installed: no ucx:// ({ucx.INSTALL})")
        return
    missing = ucx.unavailable() if needed_by else None
    if missing:
        area.failed("ucxx", missing)
        return
    version = next(filter(None, map(installed, ("ucxx-cu12", "ucxx-cu13", "ucxx"))), "installed")
    area.ok("ucxx", f"{version}; transports: {', '.join(_transports()) or 'those of the system'}")


def _transports() -> list[str]:
    """The transports beside TCP and shared memory that the UCX package has modules for."""
    spec = importlib.util.find_spec("libucx")
    folders = (spec.submodule_search_locations or []) if spec else []
    modules = [path for folder in folders for path in Path(folder).rglob("libuct_*.so*")]
    return sorted({path.name.partition("_")[2].partition(".")[0] for path in modules})
