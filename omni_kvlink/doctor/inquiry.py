"""`Inquiry`: what a doctor is asked, and the links that its URLs name."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from omni_kvlink.doctor.root import Root
from omni_kvlink.errors import SchemaError
from omni_kvlink.link.kvlink import read_url
from omni_kvlink.lowlevel import Options


class LinkAddress(NamedTuple):
    """A URL, taken apart."""

    url: str
    scheme: str
    address: str
    options: Options

    @classmethod
    def read(cls, url: str) -> LinkAddress:
        """Read a URL; SchemaError if it, or an option in it, is not valid."""
        return cls(url, *read_url(url, {}))

    @property
    def uses_sockets(self) -> bool:
        """Whether both ends meet at a named socket in the user's directory."""
        return self.scheme in ("shm", "auto")


@dataclasses.dataclass(frozen=True)
class Inquiry:
    """The question: `quota` is in bytes, `timeout` and `seconds` in seconds.

    `keys` is a directory of key files, `config` a file of settings; each is "" if none is to be
    checked. `areas` are those to examine, all if it is empty. With `quiet` no progress is shown.
    """

    urls: tuple[str, ...] = ()
    quota: int = 0
    keys: str = ""
    config: str = ""
    timeout: float = 5.0
    seconds: float = 3.0
    quiet: bool = True
    areas: tuple[str, ...] = ()
    root: Root = dataclasses.field(default_factory=Root)

    def links(self) -> list[LinkAddress]:
        """The links whose URLs are valid; the area "links" reports the others."""
        addresses = list[LinkAddress]()
        for url in self.urls:
            try:
                addresses.append(LinkAddress.read(url))
            except SchemaError:  # noqa: PERF203 (a wrong one must not hide the others)
                continue
        return addresses

    def quota_nbytes(self) -> int:
        """Bytes of all payloads together: as asked, else the largest of the URLs', else 4 GiB."""
        options = [link.options for link in self.links()] or [Options()]
        return self.quota or max(option.quota for option in options)
