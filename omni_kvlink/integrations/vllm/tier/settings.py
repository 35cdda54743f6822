"""The settings of the tier: the keys of its entry in vLLM's `secondary_tiers`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import LinkUrl, Options
from omni_kvlink.settings import ListOf, Seconds, Settings, Size, SomeOf

_PREFIX = "secondary_tiers: "
_REQUIRED = {
    "url": 'what this engine serves, such as "shm://engine-0"',
    "model": "a name of the weights with their revision and quantization, which vLLM tells no "
    'tier, such as "llama-3.1-8b@0e9e39f"; equal in the engines that share chunks',
}


@dataclasses.dataclass(frozen=True)
class TierSettings(Settings):
    """The settings of the tier of one engine; docs/vllm_tiers.md describes each."""

    url: Annotated[str, LinkUrl()] = ""  # this engine serves it; {dp} is its data-parallel number
    stores: Annotated[tuple[str, ...], ListOf(LinkUrl())] = ()  # processes `kvlink store`
    peers: Annotated[tuple[str, ...], ListOf(LinkUrl())] = ()  # what engines serve, this one too
    model: str = ""  # a name of the weights, their revision and quantization
    adapter: str = ""  # a name of the weights of all adapters
    salt: str = ""  # keeps apart what would otherwise be shared
    budget: Annotated[int, Size(least=1)] = 4 << 30  # bytes of memory for chunks
    timeout: Annotated[float, Seconds(above=0)] = 2.0  # in which a store or a peer answers
    drain: Annotated[float, Seconds()] = 0.0  # for which a shutdown waits for the stores
    locality: Literal["", "LOCAL", "REMOTE"] = ""  # for vLLM's filters and events
    # options of this engine's link and of those to stores and peers
    link: Annotated[dict[str, Any], SomeOf(Options)] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, entry: object, data_parallel_index: int) -> TierSettings:
        """Validate the keys of an entry; "{dp}" in `url` is this engine's data-parallel number.

        Raises:
            SchemaError: a setting is unknown, wrong or missing.
        """
        settings = cls.read(entry, _PREFIX)
        for name, meaning in _REQUIRED.items():
            if not getattr(settings, name):
                raise SchemaError(f"{_PREFIX}{name} is missing: {meaning}")
        url = settings.url.replace("{dp}", str(data_parallel_index))
        return dataclasses.replace(settings, url=url)
