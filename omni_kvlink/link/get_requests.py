"""The requests of several gets."""

from __future__ import annotations

from collections.abc import Iterable

from omni_kvlink.connectors.protocol.get_table import GetRequest
from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.schema import are_request_ids, check_request_id
from omni_kvlink.settings import Flag


def get_requests(request_ids: Iterable[str], *, wait: bool = True) -> list[GetRequest]:
    """Return a request for each id; SchemaError for a single id."""
    Flag().read(wait, "wait")
    return [GetRequest(each, waits=wait) for each in check_ids(request_ids)]


def check_ids(request_ids: Iterable[str]) -> list[str]:
    """Return request ids, also those of a generator; SchemaError for a single one."""
    if isinstance(request_ids, str) or not isinstance(request_ids, Iterable):
        raise SchemaError(f"request_ids={request_ids!r}: a list of request ids")
    ids = list(request_ids)
    return ids if are_request_ids(ids) else list(map(check_request_id, ids))
