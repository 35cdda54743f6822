"""This library over shared memory: `put` out of the blocks, `get(into=)` the blocks."""

from __future__ import annotations

import functools

from omni_kvlink.bench.peers import omni_kvlink

COPIES = "blocks → shared memory → blocks, both at once"
VERIFIES = omni_kvlink.VERIFIES
WAITS = omni_kvlink.WAITS
REQUIRES = ()
sender = omni_kvlink.sender
receiver = functools.partial(omni_kvlink.receiver, into=True)
