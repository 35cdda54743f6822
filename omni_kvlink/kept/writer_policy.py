"""`WriterPolicy`: to which URLs a store connects, and with which options."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.registry import is_known, split_url
from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DEFAULTS = {
    "shm": ["shm://*"],
    "auto": ["shm://*", "auto://*?tcp=127.0.0.1:*"],
    "zmq+tcp": ["zmq+tcp://127.0.0.1:*"],
}
"""The writers of a store by its scheme, unless they are given: of its own user alone."""
_SHARED = ("directory", "allow_uids", "insecure", "trusted_network", "quota")
"""Options of the store's own link that it connects with, too."""


class WriterPattern(NamedTuple):
    """URLs that a store may connect to, and the options with which it does."""

    text: str
    regex: re.Pattern[str]
    options: dict[str, Any]


class WriterPolicy:
    """The patterns of the URLs that a store may connect to, each with options behind a `?`.

    A `*` stands for any characters but "/" and ":", and in the address of a host for those of one
    label or number: `zmq+tcp://10.0.0.*:*` has 256 hosts and no others. A URL that a writer names
    has no options, so that it chooses no keys and no directory; that of `auto` may have `tcp=`, if
    the pattern does: `auto://engine-*?tcp=10.0.0.*:*`.

    Args:
        url: of the store's own link.
        patterns: empty for those of this user's processes on this machine.
        options: of the store's own link; those of its directory and its security are shared.

    SchemaError if a pattern is none, or its options are not valid.
    """

    def __init__(self, url: str, patterns: Sequence[str], options: Mapping[str, Any]):
        own_options = {**_options_in(url), **options}
        shared = {name: own_options[name] for name in _SHARED if name in own_options}
        texts = list(patterns) or _DEFAULTS.get(split_url(url)[0], [])
        self.patterns = [_pattern(text, shared) for text in texts]

    def __repr__(self) -> str:
        return f"<WriterPolicy {', '.join(one.text for one in self.patterns) or 'nobody'}>"

    def options_for(self, url: str) -> dict[str, Any] | None:
        """The options to connect to a URL with; None if the store may not connect to it."""
        for pattern in self.patterns:
            if pattern.regex.fullmatch(url):
                return pattern.options
        return None


def _pattern(text: str, shared: Mapping[str, Any]) -> WriterPattern:
    scheme, location = split_url(text)
    if not is_known(scheme):
        raise SchemaError(f"writers {text!r}: no connector {scheme}; one looks like shm://engine-*")
    name, _, query = location.partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    addresses = [value for option, value in options if (scheme, option) == ("auto", "tcp")]
    shown = f"{scheme}://{name}"
    regex = f"{re.escape(scheme)}://{_regex(name, is_host=scheme in ('zmq+tcp', 'ucx'))}"
    for address in addresses:
        shown += f"?tcp={address}"
        regex += rf"\?tcp={_regex(address, is_host=True)}"
    own_options = Options.parse([pair for pair in options if not addresses or pair[0] != "tcp"])
    return WriterPattern(shown, re.compile(regex), {**shared, **own_options})


def _regex(pattern: str, *, is_host: bool) -> str:
    """The regular expression of a pattern of names, or of hosts and ports."""
    any_part = r"[^/:.?&]*" if is_host else r"[^/:?&]*"
    return any_part.join(map(re.escape, pattern.split("*")))


def _options_in(url: str) -> dict[str, Any]:
    return Options.parse(parse_qsl(url.partition("?")[2], keep_blank_values=True))
