"""Examines key files: whether each holds a key, and who may read it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from omni_kvlink.connectors.control.keys import (
    PUBLIC,
    SECRET,
    read_all,
    read_public,
    read_secret,
    user_key_path,
)

if TYPE_CHECKING:
    from omni_kvlink.doctor.findings import Area
    from omni_kvlink.doctor.inquiry import Inquiry


def examine(area: Area, inquiry: Inquiry) -> None:
    """Add the findings of the directory, of the URLs' files, else of this user's own key."""
    for link in inquiry.links():
        options = link.options
        if options.keys:
            with area.guarded("keys="):
                read_secret(options.keys)
                area.ok("keys=", f"{options.keys}, a secret key for this user alone")
        if options.peers:
            with area.guarded("peers="):
                _peers(area, options.peers)
    if inquiry.keys:
        _directory(area, inquiry.keys)
    if not area.findings:
        with area.guarded("own key"):
            _own(area)


def _peers(area: Area, path: str) -> None:
    if not os.path.isdir(path):
        read_public(path)
        area.ok("peers=", f"{path}, a public key")
        return
    found, problems = read_all(path)
    for problem in problems:
        area.failed("peers=", problem)
    if found:
        area.ok("peers=", f"{path}: {len(found)} public keys")
    elif not problems:
        cure = "copy the .public file of each other side there (`kvlink keygen`)"
        area.wrong("peers=", f"{path} has no public key", cure)


def _directory(area: Area, directory: str) -> None:
    if not os.path.isdir(directory):
        cure = f"make it: kvlink keygen {directory} NAME"
        area.wrong("keys", f"there is no directory {directory}", cure)
        return
    readers = {SECRET: read_secret, PUBLIC: read_public}
    paths = [path for path in sorted(Path(directory).iterdir()) if path.suffix in readers]
    for path in paths:
        with area.guarded(path.name):
            readers[path.suffix](str(path))
            rights = "for this user alone" if path.suffix == SECRET else "to be shared"
            area.ok(path.name, f"a {path.suffix[1:]} key, {rights}")
    if not paths:
        cure = f"make them: kvlink keygen {directory} NAME"
        area.wrong("keys", f"{directory} has no key files", cure)


def _own(area: Area) -> None:
    path = user_key_path()
    if os.path.exists(path):
        read_secret(path)
        area.ok("own key", f"{path}, for links over loopback")
    else:
        area.ok("own key", f"{path}, which the first link over loopback makes")
