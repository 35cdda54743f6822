"""KV heads between stages of unequal tensor-parallel degrees: who sends which, sliced and merged.

Nothing here waits or copies, but for `merge_heads`. Heads are numbered as in the whole model.

    topology = Topology(heads=8, senders=2, receivers=4)
    for part in topology.sent_by(rank):  # on each rank of the producer; `cache.metadata.shard`
        link.put(part.of(cache), readers=len(part.receivers))  # is topology.sender(rank)

    parts = topology.sent_to(rank)  # on each rank of the consumer
    got = [links[part.shard.rank].get(part.key("req-1"), timeout=5.0) for part in parts]
    targets = head_targets([received.data for received in got], into=mine)
    for received, target in zip(got, targets, strict=True):
        received.scatter(target)  # the one copy, straight into the heads' place in `mine`

A latent (layout "ND", MLA) has no heads: every rank holds all of it, as if it were one head
(`heads=1`), and each receiver gets it from one sender.
"""

from omni_kvlink.topology.heads import blank_heads as blank_heads
from omni_kvlink.topology.heads import head_targets as head_targets
from omni_kvlink.topology.heads import merge_heads as merge_heads
from omni_kvlink.topology.heads import slice_heads as slice_heads
from omni_kvlink.topology.parts import Part as Part
from omni_kvlink.topology.parts import Topology as Topology
from omni_kvlink.topology.parts import shard_of as shard_of
