"""`CacheIdentity`: what decides the bytes of a cache, as a part of its key."""

from __future__ import annotations

import dataclasses
import hashlib

import msgspec

from omni_kvlink.connectors.protocol.kept_table import IDENTITY_CHARS
from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.schema import check_request_id

_SEPARATOR = "@"


@dataclasses.dataclass(frozen=True)
class CacheIdentity:
    """A digest of all that decides a cache's bytes beside its tokens; another one is another key.

    `CacheIdentity(model="llama-3.1-8b", revision="0e9e39f", dtype="bfloat16").key("block/3f2a")` is
    the request id of a payload that is kept, and the one that readers ask for. A reader with
    another identity misses, and its miss is counted as such by the producer.

    All are texts of the caller's choice, and compared as they are.

    Args:
        model: the name of the weights; required.
        revision: of the weights, such as a commit or a digest: names are put to new weights.
        dtype: of the cache, with its quantization, such as "bfloat16" or "fp8_e4m3/scale=0.5".
        layout: of a block: its tokens, layers, heads, and the rank of the shard.
        rope: how positions are encoded, where the model's configuration was changed.
        adapter: of a LoRA, its name and a digest of its weights.
        salt: keeps the caches of tenants apart.
        media: a digest of images, audio or other inputs that are not tokens.
    """

    model: str
    revision: str = ""
    dtype: str = ""
    layout: str = ""
    rope: str = ""
    adapter: str = ""
    salt: str = ""
    media: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) or not value.isprintable():  # as a lone surrogate is not
                raise SchemaError(f"{field.name}={value!r}: a text of printable characters")
        if not self.model:
            raise SchemaError("model='': name the weights, they decide the bytes")

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, of BLAKE2b over all parts and their names."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value}
        parts = msgspec.json.encode(given)  # an attribute that a later version adds changes nothing
        return hashlib.blake2b(parts, digest_size=(IDENTITY_CHARS - 1) // 2).hexdigest()

    def key(self, name: str) -> str:
        """Return the request id of what `name` names under this identity.

        SchemaError if it is empty, or longer than a request id may be.
        """
        check_request_id(name)
        return check_request_id(f"{name}{_SEPARATOR}{self.digest}")
