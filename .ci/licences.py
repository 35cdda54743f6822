"""Prints the licence of every package that is required; fails on one that is not permissive.

The packages are those installed in this environment, with what they require in turn.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

PERMISSIVE = re.compile(
    r"apache|bsd|mit\b|isc|psf|python software|unlicense|public domain|zlib|historical|hpnd|mpl",
    re.IGNORECASE,
)
RESTRICTIVE = re.compile(r"\b[al]?gpl|affero|proprietary|nvidia", re.IGNORECASE)


def licence_of(name: str) -> str:
    """The licence that a package states: an expression, classifiers, or a text's first line."""
    about = distribution(name).metadata
    if stated := about.get_all("License-Expression"):
        return str(stated[0])
    classifiers = about.get_all("Classifier") or []
    found = [one.rsplit(" :: ", 1)[-1] for one in classifiers if one.startswith("License ::")]
    text = (about.get_all("License") or ["not stated"])[0]
    return ", ".join(found) or str(text).strip().splitlines()[0]


def required(name: str, extras: frozenset[str], found: dict[str, str]) -> None:
    """Add a package and all that it requires here to `found`."""
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        marker, wanted = requirement.marker, extras or {""}
        if marker and not any(marker.evaluate({"extra": extra}) for extra in wanted):
            continue
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if key in found or key == "omni-kvlink":
            continue
        try:
            found[key] = licence_of(key)
        except PackageNotFoundError:
            found[key] = "NOT INSTALLED"
            continue
        required(key, frozenset(requirement.extras), found)


def main() -> int:
    """Print the table; return 1 if a licence is unknown or not permissive."""
    found: dict[str, str] = {}
    required("omni-kvlink", frozenset(sys.argv[1:]), found)
    bad = [
        name
        for name, licence in found.items()
        if RESTRICTIVE.search(licence) or not PERMISSIVE.search(licence)
    ]
    for name, licence in sorted(found.items()):
        print(f"{'FAIL' if name in bad else 'ok':5}{name:24}{licence}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
