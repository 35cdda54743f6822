"""An engine whose link flips one byte of each payload named `bad…`, after its digest was taken.

The scheme `flip` is shared memory with such a fault; readers connect to it as `shm`.
"""

from __future__ import annotations

from typing import Any

from omni_kvlink.connectors import registry, shm
from omni_kvlink.connectors.base import Backend, Options
from omni_kvlink.payload.manifest import Manifest
from support.vllm import engine as vllm_engine


def serve(address: str, options: Options) -> Any:
    producer = shm.BACKEND.serve(address, options)
    begin, announce = producer.begin, producer.announce
    plans: dict[str, Manifest] = {}

    def begin_it(lease: Any, draft: bytes, **options: Any) -> None:
        plan = Manifest.decode(draft, lease.region.nbytes)
        plans[str(id(lease))] = plan
        begin(lease, draft, **options)

    def flip_it(lease: Any, first: int, digests: tuple[bytes, ...]) -> None:
        plan = plans[str(id(lease))]
        if plan.request_id.startswith("bad") and first == 1:  # a block's bytes in layer 1
            lease.region.view()[plan.header_nbytes + plan.tensors[first].start + 100] ^= 1
        announce(lease, first, digests)

    producer.begin, producer.announce = begin_it, flip_it  # type: ignore[method-assign]
    return producer


FLIPPING = Backend(serve, shm.BACKEND.connect)

if __name__ == "__main__":
    registry.register("flip", "support.vllm.flipping:FLIPPING")
    vllm_engine.main()
