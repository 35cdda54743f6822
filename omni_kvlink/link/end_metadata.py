"""The metadata at the end of a stream: a small JSON object, written with the commit."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from omni_kvlink.connectors.protocol.messages import MAX_EXTRA
from omni_kvlink.errors import SchemaError, WireError
from omni_kvlink.payload.kv_checks import through_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_kvlink.connectors.protocol.delivery import Delivery


def encode_extra(values: Mapping[str, Any] | None) -> bytes:
    """Return the metadata as a message carries it; SchemaError if it is not JSON, or too long."""
    if not values:
        return b""
    text, _ = through_json(dict(values), "extra")
    if len(text) > MAX_EXTRA:
        raise SchemaError(f"extra has {len(text)} bytes of JSON; the limit is {MAX_EXTRA}")
    return text


def extra_of(delivery: Delivery) -> Mapping[str, Any]:
    """Return the metadata at the end of what arrived; it is empty before the end, and if none came.

    WireError if it is no JSON object; the payload is rejected then.
    """
    try:
        return decode_extra(delivery.extra)
    except WireError as error:
        delivery.reject(str(error))
        raise WireError(f"payload {delivery.key!r}: {error}") from None


def decode_extra(text: bytes) -> Mapping[str, Any]:
    """Return the metadata of a message; WireError if it is no JSON object."""
    if not text:
        return MappingProxyType({})
    try:
        return MappingProxyType(msgspec.json.decode(text, type=dict[str, Any]))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"the metadata at its end is no JSON object: {error}") from None
