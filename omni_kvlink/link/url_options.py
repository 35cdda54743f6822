"""How a link was asked for: its URL, its options, its copier."""

from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import parse_qsl

from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.registry import split_url
from omni_kvlink.copier import Copier, NativeCopier, PinnedCopier, TorchCopier, fastest_copier


def parse(url: str, options: dict[str, Any]) -> tuple[str, str, Options]:
    """A link's scheme, its address, and its options, of which the URL may have some.

    Raises:
        ValueError: there is no such option, or it cannot be that.
    """
    scheme, rest = split_url(url)
    address, _, query = rest.partition("?")
    fields = {field.name: field.type for field in dataclasses.fields(Options)}
    values: dict[str, Any] = {
        name: int(text) if fields.get(name) in ("int", "bool") else text
        for name, text in parse_qsl(query)
    }
    values.update(options)
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"no option {', '.join(unknown)}; there are {', '.join(fields)}")
    return scheme, address, Options(**values)


def named_copier(name: str) -> Copier:
    """An explicit wish that cannot be met is an error; "auto" says once if it had to do without."""
    if name == "auto":
        return fastest_copier()
    if name == "native":
        return NativeCopier()
    if name == "torch":
        return TorchCopier()
    if name == "pinned":
        return PinnedCopier()
    raise ValueError(f"no copier {name!r}; there are 'auto', 'pinned', 'native' and 'torch'")
