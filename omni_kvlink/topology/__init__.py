"""KV heads between stages of different tensor-parallel degrees: planned, sliced and merged.

Only `merge_heads` copies, nothing blocks. Heads are numbered as in the whole model.

    topology = Topology(heads=8, senders=2, receivers=4)
    for part in topology.sent_by(rank):  # on each rank of the producer; `cache.metadata.shard`
        link.put(part.of(cache), readers=len(part.receivers))  # is topology.sender(rank)

    parts = topology.sent_to(rank)  # on each rank of the consumer
    payloads = [links[part.shard.rank].get(part.key("req-1"), timeout=5.0) for part in parts]
    targets = head_targets([received.data for received in payloads], into=own)
    for received, target in zip(payloads, targets, strict=True):
        received.scatter(target)  # the one copy, directly into these heads of `own`

A latent (layout "ND", MLA) has no heads: every rank has all of it, like a single head (`heads=1`),
and each receiver gets it from one sender.
"""

from omni_kvlink.topology.heads import blank_heads as blank_heads
from omni_kvlink.topology.heads import head_targets as head_targets
from omni_kvlink.topology.heads import merge_heads as merge_heads
from omni_kvlink.topology.heads import slice_heads as slice_heads
from omni_kvlink.topology.parts import Part as Part
from omni_kvlink.topology.parts import Topology as Topology
from omni_kvlink.topology.parts import shard_of as shard_of
