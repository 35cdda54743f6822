"""A request's `ec_transfer_params`, which a client wrote: read once, and never trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.params import MAX_READERS
from omni_kvlink.lowlevel import check_request_id

URL, KEY, READERS = "url", "key", "readers"


@dataclasses.dataclass(frozen=True)
class Source:
    """The place of one encoder output; with an `error`, it cannot be loaded."""

    url: str = ""  # the producer's; the first of the peers if empty
    key: str = ""  # the payload's request id on the link
    readers: int = 1  # how many requests the producer put it for
    error: str = ""  # which field is wrong, and what it must be

    @classmethod
    def read(cls, entry: Mapping[Any, Any]) -> Source:
        """Read the params of one media item, which have a key; never raises."""
        url, key, readers = entry.get(URL), entry[KEY], entry.get(READERS, 1)
        url = "" if url is None else url
        if not isinstance(url, str):
            return cls(error=_wrong(URL, url, "a string"))
        try:
            name = check_request_id(key)
        except SchemaError:
            return cls(error=_wrong(KEY, key, "a string of 1 to 1024 characters"))
        if not _is_count(readers) or readers == 0:
            return cls(error=_wrong(READERS, readers, f"an integer from 1 to {MAX_READERS}"))
        return cls(url, name, readers)


def read_sources(params: object, items: Collection[str]) -> dict[str, Source]:
    """The sources of a request's items, by item, as far as its params name them; never raises."""
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        return dict.fromkeys(items, Source(error=_wrong("ec_transfer_params", params, "an object")))
    named = {item: params[item] for item in items if item in params}
    return {
        item: Source.read(entry)
        for item, entry in named.items()
        if isinstance(entry, Mapping) and KEY in entry  # without, it is media of a known size
    }


def other_items(params: object, items: Collection[str]) -> list[str]:
    """The items that a request's params name a source of, and that the request does not have."""
    entries = params if isinstance(params, Mapping) else {}
    return [
        str(name)
        for name, entry in entries.items()
        if isinstance(entry, Mapping) and KEY in entry and name not in items
    ]


def read_readers(params: object, default: int) -> tuple[int, str]:
    """The number of requests that read the outputs of a producer's request; or 0 and an error."""
    if params is None:
        return default, ""
    if not isinstance(params, Mapping):
        return 0, _wrong("ec_transfer_params", params, "an object")
    readers = params.get(READERS, default)
    if not _is_count(readers):
        return 0, _wrong(READERS, readers, f"an integer from 0 to {MAX_READERS}")
    return readers, ""


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_READERS


def _wrong(name: str, value: object, rule: str) -> str:
    is_scalar = isinstance(value, (str, int, float, type(None)))
    shown = f"{value!r:.100}" if is_scalar else f"a {type(value).__name__}"
    return f"{name} is {shown}, not {rule}"
