"""The messages between a store and those that write to it.

A writer, which keeps payloads in its own link, asks for a key of the store's link that names its
URL and its inbox, and goes on waiting for it: that is how the store learns of it, and how it learns
of the store's end. The store connects to the writer's link and gets one `KeptOffer` after the other
from the inbox. It releases one when it has what it was offered.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.tensor_data import TensorTransferData

if TYPE_CHECKING:
    from omni_kvlink.payload.bundle import Payload

MAX_OFFERED = 64
"""Keys of one offer."""
RESERVED = "kvlink-store/"
"""The beginning of the keys of messages; no payload of a store has such a key."""
_ATTACH = re.compile(r"kvlink-store/attach/([0-9a-f]{32})/(.+)", re.DOTALL)
_Keys = Annotated[list[str], msgspec.Meta(max_length=MAX_OFFERED)]


class KeptOffer(msgspec.Struct, frozen=True):
    """Keys that the writer keeps, for the store to fetch, and keys that it withdraws."""

    kept: _Keys
    withdrawn: _Keys = []


class Attachment(NamedTuple):
    """A writer: the key of its offers, and the URL at which it serves them."""

    inbox: str
    url: str

    @property
    def key(self) -> str:
        """The key of the store's link by which the writer makes itself known."""
        return f"{RESERVED}attach/{self.inbox}/{self.url}"

    @property
    def inbox_key(self) -> str:
        """The key of the writer's link under which its offers are."""
        return f"{RESERVED}offers/{self.inbox}"


def read_attachment(key: str) -> Attachment | None:
    """The writer that a key names; None if it is no such key."""
    found = _ATTACH.fullmatch(key)
    return None if found is None else Attachment(found[1], found[2])


def advertised(url: str) -> str:
    """The URL by which others connect to a link: without options but the one that says where."""
    address, _, query = url.partition("?")
    tcp = [option for option in query.split("&") if option.startswith("tcp=")]
    return f"{address}?{tcp[0]}" if tcp else address


def offer_payload(key: str, offer: KeptOffer) -> TensorTransferData:
    """An offer to be put."""
    return TensorTransferData(key, {}, msgspec.to_builtins(offer))


def read_offer(data: Payload) -> KeptOffer:
    """The offer in a payload; SchemaError if there is none."""
    metadata = data.metadata if isinstance(data, TensorTransferData) else {}
    try:
        return msgspec.convert(metadata, KeptOffer)
    except msgspec.ValidationError as error:
        raise SchemaError(f"payload {data.request_id!r} is no offer: {error}") from None
