"""Key files of encrypted links: `NAME.secret` stays where it was made, `NAME.public` is shared.

What reads a key raises ConnectorError if there is no such file, or it holds no key.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
from pathlib import Path

import zmq
import zmq.utils.z85

from omni_kvlink.connectors.runtime.user_files import check_private, default_directory
from omni_kvlink.errors import ConnectorError, SchemaError
from omni_kvlink.system.failures import translate_errors

SECRET, PUBLIC = ".secret", ".public"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_USER_KEY = "user" + SECRET
_KEY_CHARS = 40
"""Characters of a key: 32 bytes in Z85."""


def generate(directory: str, name: str) -> tuple[str, str]:
    """Make a key pair; write it to `NAME.secret` (mode 0600) and `NAME.public` (mode 0644).

    The directory is created if it does not exist; no key is ever overwritten. Returns the paths of
    the secret and of the public file.
    """
    if not _NAME.fullmatch(name):
        raise SchemaError(f"{name!r}: 1 to 64 letters, digits, '.', '_' or '-', a letter first")
    public, secret = zmq.curve_keypair()
    with translate_errors(directory, "give another directory"):
        os.makedirs(directory, mode=0o700, exist_ok=True)
    paths = list[str]()
    with contextlib.ExitStack() as undo:
        for suffix, key, mode in ((SECRET, secret, 0o600), (PUBLIC, public, 0o644)):
            path = os.path.join(directory, name + suffix)
            with translate_errors(path, "give another directory"):
                _write(path, key, mode, undo)
            paths.append(path)
        undo.pop_all()
    return paths[0], paths[1]


def _write(path: str, key: bytes, mode: int, undo: contextlib.ExitStack) -> None:
    """Write a new file, whole; `undo` removes it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise ConnectorError(f"{path} exists; remove it, or take another name") from None
    undo.callback(_remove, path)
    with os.fdopen(fd, "wb") as file:
        file.write(key + b"\n")
        file.flush()
        os.fsync(fd)  # after a power failure the name must not belong to an empty file


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # the directory was removed
        os.unlink(path)


def user_key_path() -> str:
    """Return the path of this user's own secret key."""
    return os.path.join(default_directory(), _USER_KEY)


def user_secret() -> bytes:
    """Return this user's own secret key, as Z85 text; make it if there is none yet.

    Processes that make it at the same time get the same key. Raises ConnectorError if its directory
    is not private to this user.
    """
    path = user_key_path()
    other = "set XDG_RUNTIME_DIR to a directory of this user, or give keys= and peers="
    check_private(os.path.dirname(path), other=other)
    with translate_errors(f"{path}, the key of this user", other):
        if not os.path.exists(path):
            _make_user_secret(path)
    return read_secret(path)


def _make_user_secret(path: str) -> None:
    """Write a new key beside `path`, whole, then give it that name if no process has been faster.

    The draft's name is random: another process's draft is never seen, and one that a killed process
    left is never used.
    """
    draft = f"{path}.{os.urandom(8).hex()}"
    with contextlib.ExitStack() as undo, contextlib.suppress(FileExistsError):
        _write(draft, zmq.curve_keypair()[1], 0o600, undo)
        os.link(draft, path)


def read_secret(path: str) -> bytes:
    """Read a secret key, as Z85 text, from a file that no other user can read."""
    with translate_errors(f"keys={path}", "give the file of a secret key (`kvlink keygen`)"):
        mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise ConnectorError(f"keys={path} can be read by others (mode {mode:o}): chmod 600 it")
    return read_public(path)


def read_public(path: str) -> bytes:
    """Read a public key, as Z85 text."""
    other = "give a key file, which `kvlink keygen` makes"
    with translate_errors(path, other), open(path, "rb") as file:
        text = file.read(_KEY_CHARS + 2).strip()
    try:
        if len(text) != _KEY_CHARS or len(zmq.utils.z85.decode(text)) != 32:
            raise ValueError
    except (ValueError, KeyError, struct.error):  # the last: digits beyond 32 bits
        raise ConnectorError(f"{path} holds no key; make one with `kvlink keygen`") from None
    return text


def read_all(directory: str) -> tuple[set[bytes], list[str]]:
    """Read the keys, 32 bytes each, of all `.public` files in a directory.

    An error's text is returned for each file that holds none.
    """
    with translate_errors(f"peers={directory}", "give a directory of public keys"):
        paths = [path for path in Path(directory).iterdir() if path.suffix == PUBLIC]
    keys, problems = set[bytes](), list[str]()
    for path in paths:
        try:
            keys.add(zmq.utils.z85.decode(read_public(str(path))))
        except ConnectorError as error:  # noqa: PERF203 (one file must not hide the others)
            problems.append(str(error))
    return keys, problems
