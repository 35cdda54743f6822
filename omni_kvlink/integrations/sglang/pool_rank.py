"""`PoolRank`: which part of each page a rank of SGLang has, and which link it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

RANK = "{rank}"
"""The text that stands for a rank's number in `serve` and `peers`."""


class PoolRank:
    """A rank of SGLang's parallel groups, from its storage configuration."""

    def __init__(self, config: HiCacheStorageConfig):
        self._config = config

    def number(self, tp_rank: int) -> int:
        """The number of a rank of this one's groups, over data, pipeline, tensor and context."""
        config = self._config
        stage = config.dp_rank * config.pp_size + config.pp_rank
        return int((stage * config.tp_size + tp_rank) * config.attn_cp_size + config.attn_cp_rank)

    def name(self, *, is_replicated: bool) -> str:
        """A text that tells this rank's part of a page from others'; one if it is replicated."""
        config = self._config
        parts = [f"pp{config.pp_rank}of{config.pp_size}"]
        if not is_replicated:
            parts.append(f"tp{config.tp_rank}of{config.tp_size}")
        parts.append(f"cp{config.attn_cp_rank}of{config.attn_cp_size}")
        if config.dcp_size > 1:
            parts.append(f"dcp{config.dcp_rank}of{config.dcp_size}page{config.logical_page_size}")
        return "-".join(parts)

    def serve(self, url: str) -> str:
        """The URL that this rank serves.

        Raises:
            SchemaError: there are several ranks, and the URL has no {rank} to tell them apart.
        """
        config = self._config
        number = self.number(config.tp_rank)
        if RANK not in url and (
            number or config.tp_size * config.pp_size * config.attn_cp_size > 1
        ):
            raise SchemaError(f"serve={url!r}: each rank serves a link; write {RANK} into its URL")
        return url.replace(RANK, str(number))

    def peers(self, urls: tuple[str, ...], serve: str) -> tuple[str, ...]:
        """The links of other engines' ranks of this number, and of the rank that writes for it."""
        config = self._config
        number = self.number(config.tp_rank)
        writers = {number} if config.is_storage_writer else {number, self.number(config.dcp_rank)}
        others_urls = [url.replace(RANK, str(rank)) for url in urls for rank in sorted(writers)]
        own_urls = [serve.replace(RANK, str(rank)) for rank in sorted(writers) if rank != number]
        return tuple(dict.fromkeys((*own_urls, *others_urls)))
