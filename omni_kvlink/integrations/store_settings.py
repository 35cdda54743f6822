"""`StoreSettings`: the links and the identity of a host's cache, read from its configuration."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from omni_kvlink.kept import CacheIdentity, StoreClient
from omni_kvlink.lowlevel import LinkUrl, Options
from omni_kvlink.settings import ListOf, Seconds, Settings, Size, SomeOf, Text


@dataclasses.dataclass(frozen=True)
class StoreSettings(Settings):
    """Settings of a host: where blocks are kept and looked for, and what decides their bytes.

    Hosts name the model, not its weights: `revision` has no default, because two engines with other
    weights under one name would else read each other's blocks.

    Raises:
        SchemaError: a setting is unknown, missing, or has an invalid value.
    """

    # the link that this process serves, "shm://engine-a"
    serve: Annotated[str, Text("shm://engine-a", filled=True)]
    # of the weights: a commit, a digest
    revision: Annotated[str, Text("a commit or a digest of the weights", filled=True)]
    stores: Annotated[tuple[str, ...], ListOf(LinkUrl())] = ()  # `kvlink store` processes
    peers: Annotated[tuple[str, ...], ListOf(LinkUrl())] = ()  # links that other engines serve
    budget: Annotated[int, Size(least=1)] = 4 << 30  # bytes of memory for blocks
    timeout: Annotated[float, Seconds(above=0)] = 2.0  # in which a store or a peer answers
    dtype: str = ""  # of the cache, with its quantization
    rope: str = ""  # if the model's configuration was changed
    adapter: str = ""  # of a LoRA, with a digest
    salt: str = ""  # keeps caches apart
    media: str = ""  # a digest of inputs that are not tokens
    # link options, such as directory, keys, verify
    options: Annotated[dict[str, Any], SomeOf(Options)] = dataclasses.field(default_factory=dict)

    def client(self) -> StoreClient:
        """Serve the link, and connect to stores and peers in the background.

        Raises:
            BusyError, UnavailableError, TransferTimeout: as `StoreClient`.
        """
        return StoreClient(
            self.serve,
            stores=self.stores,
            peers=self.peers,
            budget=self.budget,
            timeout=self.timeout,
            **self.options,
        )

    def identity(self, model: str, *, layout: str = "", salt: str = "") -> CacheIdentity:
        """All that decides the bytes of a block of this model; `salt` is the host's."""
        return CacheIdentity(
            model=model,
            revision=self.revision,
            dtype=self.dtype,
            layout=layout,
            rope=self.rope,
            adapter=self.adapter,
            salt=repr((self.salt, salt)) if salt else self.salt,
            media=self.media,
        )
