"""This library over shared memory: `put` out of the blocks, `get`, `scatter` into the blocks."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COPIES = "blocks → shared memory → blocks"
VERIFIES = "CRC-32C, layout"
WAITS = "wakes"
REQUIRES = ()
_KEY = "bench"


@contextlib.contextmanager
def sender(end: Any, url: str = "shm://") -> Iterator[Callable[[], None]]:
    """Put the blocks as a KV cache, and wait for the receipt."""
    from omni_kvlink import KVCacheTransferData, KVLink, KVMetadata

    tokens, layers = len(end.ids) * end.tokens, -(-len(end.memory) // 2)
    metadata = KVMetadata((tokens,), (0,), layers)
    keys, values = _views(end)[::2], _views(end)[1::2]
    parts = {"key_cache": keys, "value_cache": values}
    cache = KVCacheTransferData(_KEY, parts, (), metadata)
    url = f"{url}{end.folder.name}" if url == "shm://" else url
    quota = max(1 << 30, 3 * end.memory.nbytes)
    with KVLink.serve(url, quota=quota) as link:
        end.publish("url", link.url.encode())
        yield lambda: link.put(cache, timeout=60.0).wait(timeout=60.0)


@contextlib.contextmanager
def receiver(end: Any, *, into: bool = False) -> Iterator[Callable[[], int]]:
    """Get the payload, then scatter it; with `into` both at once."""
    from omni_kvlink import KVLink

    targets = _views(end)

    def receive() -> int:
        received = link.get(_KEY, timeout=60.0, into=targets if into else None)
        arrived = time.monotonic_ns()
        if not into:
            received.scatter(targets)
        received.release()
        return arrived

    with KVLink.connect(end.published("url").decode(), timeout=20.0) as link:
        yield receive


def _views(end: Any) -> list[Any]:
    """The tensors of the payload, layer by layer, K before V: `[tokens, 1, bytes]` uint8."""
    import torch

    from omni_kvlink import BlockTable, PagedTensor

    torch.set_num_threads(1)
    row = end.nbytes // end.tokens
    pools = torch.from_numpy(end.memory).view(*end.memory.shape[:2], end.tokens, 1, row)
    tokens = len(end.ids) * end.tokens
    if not end.is_paged:
        return [pool[1:-1].reshape(tokens, 1, row) for pool in pools]
    table = BlockTable.of_blocks(end.ids.tolist(), tokens=tokens, block_size=end.tokens)
    return [PagedTensor(pool, table) for pool in pools]
