"""A namespace of prompts; its digest begins each encoded prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.kv_checks import json_copy

Namespace: TypeAlias = str | bytes | Mapping[str, Any]
"""All that a prompt's cache depends on besides its tokens; the mapping has JSON values."""

DIGEST_SIZE = 32
NO_NAMESPACE = bytes(DIGEST_SIZE)
"""The digest of `""`."""


def digest(namespace: Namespace) -> bytes:
    """SHA-256 of a namespace; `NO_NAMESPACE` for `""`, SchemaError if it is none.

    The hashed bytes begin with the kind of the namespace: text never equals a mapping.
    """
    if isinstance(namespace, str):
        if not namespace:
            return NO_NAMESPACE
        hashed = b"text " + namespace.encode(errors="surrogatepass")
    elif isinstance(namespace, bytes):
        hashed = b"bytes " + namespace
    elif isinstance(namespace, Mapping):
        values = json_copy(dict(namespace), "namespace")
        hashed = b"json " + msgspec.json.encode(values, order="deterministic")
    else:
        kind = type(namespace).__name__
        raise SchemaError(f"namespace: {kind}; wanted str, bytes or a mapping of JSON values")
    return hashlib.sha256(hashed).digest()
