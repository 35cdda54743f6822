"""Key files of encrypted links: `NAME.secret` stays where it was made, `NAME.public` travels."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import zmq
import zmq.utils.z85

from omni_kvlink.errors import ConnectorError

SECRET, PUBLIC = ".secret", ".public"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TEXT = 40
"""Characters of a key: 32 bytes in Z85."""


def generate(directory: str, name: str) -> tuple[str, str]:
    """Make a pair of keys; the paths of the secret and of the public one.

    Raises:
        ConnectorError: there are such files already; no key is ever overwritten.
        ValueError: the name is no plain file name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r}: 1 to 64 letters, digits, '.', '_' or '-', a letter first")
    public, secret = zmq.curve_keypair()
    os.makedirs(directory, mode=0o700, exist_ok=True)
    paths = []
    for suffix, key, mode in ((SECRET, secret, 0o600), (PUBLIC, public, 0o644)):
        path = os.path.join(directory, name + suffix)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            raise ConnectorError(f"{path} exists; remove it, or take another name") from None
        with os.fdopen(fd, "wb") as file:
            file.write(key + b"\n")
        paths.append(path)
    return paths[0], paths[1]


def read_secret(path: str) -> bytes:
    """A secret key, as Z85 text.

    Raises:
        ConnectorError: no such file, no key in it, or others can read it.
    """
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise ConnectorError(f"keys={path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConnectorError(f"keys={path} can be read by others (mode {mode:o}): chmod 600 it")
    return _read(path)


def read_public(path: str) -> bytes:
    """A public key, as Z85 text.

    Raises:
        ConnectorError: no such file, or no key in it.
    """
    return _read(path)


def read_all(directory: str) -> set[bytes]:
    """The keys, 32 bytes each, of every `.public` file in a directory; others are passed over.

    Raises:
        ConnectorError: it cannot be read.
    """
    try:
        paths = [path for path in Path(directory).iterdir() if path.suffix == PUBLIC]
    except OSError as error:
        raise ConnectorError(f"peers={directory}: {error.strerror}") from None
    return {zmq.utils.z85.decode(_read(str(path))) for path in paths}


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            text = file.read(_TEXT + 2).strip()
    except OSError as error:
        raise ConnectorError(f"{path}: {error.strerror}") from None
    try:
        if len(text) != _TEXT or len(zmq.utils.z85.decode(text)) != 32:
            raise ValueError
    except (ValueError, KeyError):
        raise ConnectorError(f"{path} holds no key; make one with `kvlink-bench keygen`") from None
    return text
