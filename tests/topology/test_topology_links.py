"""Heads between ranks of unequal number, over links: bit-exact, one copy on each side."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVLink, Received, Shard
from omni_kvlink.adapters import PagedAdapter, PagedCache
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import Recipe, make_bundle
from omni_kvlink.topology import Topology, blank_heads, head_targets, merge_heads, slice_heads
from support.payloads.paged import COPIERS
from support.payloads.sharded import blank_like, contents, shard_of_cache, shard_of_latent, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("leaves_nothing")
_numbers = itertools.count()
ROOT = Path(__file__).parents[2]

DEGREES = [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)]


class Stages:
    """A link of each sender, and each receiver's ends of them."""

    def __init__(self, scheme: str, sockets: str, topology: Topology, stack: ExitStack):
        urls = [f"{scheme}://heads-{next(_numbers)}" for _ in range(topology.senders)]
        self.topology = topology
        self.served = [
            stack.enter_context(KVLink.serve(url, directory=sockets, quota=8 << 20, inline=0))
            for url in urls
        ]
        self.ends = [
            [
                stack.enter_context(KVLink.connect(url, timeout=60, directory=sockets))
                for url in urls
            ]
            for _ in range(topology.receivers)
        ]

    def get(self, rank: int, request_id: str) -> list[Received]:
        return [
            self.ends[rank][part.shard.rank].get(part.key(request_id), timeout=60)
            for part in self.topology.sent_to(rank)
        ]


def kv(received: Received) -> KVCacheTransferData | KVCacheBundle:
    data = received.data
    assert isinstance(data, KVCacheTransferData | KVCacheBundle)
    return data


def fill(got: Sequence[Received], mine: KVCacheTransferData) -> None:
    targets = head_targets([kv(one) for one in got], into=mine)
    for received, target in zip(got, targets, strict=True):
        received.scatter(target)
        assert received.ledger.copies == 1
        received.release()


@pytest.mark.parametrize("scheme", ["inproc", "shm"])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("senders", "receivers"), DEGREES)
def test_bit_exact(scheme: str, heads: int, senders: int, receivers: int, sockets: str) -> None:
    topology, data = Topology(heads, senders, receivers), whole(heads=heads, ropes=[2])
    with ExitStack() as stack:
        stages = Stages(scheme, sockets, topology, stack)
        receipts = []
        for rank, link in enumerate(stages.served):
            mine = shard_of_cache(data, topology.sender(rank))
            receipts += [
                link.put(part.of(mine), readers=len(part.receivers))
                for part in topology.sent_by(rank)
            ]
            for view in mine.tensors():
                dense(view).zero_()  # committed: the tensors are the engine's again
        for rank in range(receivers):
            expected = shard_of_cache(data, topology.receiver(rank))
            mine = blank_like(expected)
            fill(stages.get(rank, "r"), mine)
            assert contents(mine) == contents(expected)
        for receipt in receipts:
            receipt.wait(timeout=60)
            assert receipt.ledger.copies == 1


def test_merged_from_views(sockets: str) -> None:
    """A bundle, without tensors of one's own; what is merged does not need the payloads."""
    topology, data = Topology(4, 2, 1), make_bundle(Recipe("b", heads=4))
    with ExitStack() as stack:
        stages = Stages("shm", sockets, topology, stack)
        receipts = []
        for link, (start, stop) in zip(stages.served, ((0, 2), (2, 4)), strict=True):
            part = slice_heads(data, start, stop)
            receipts.append(link.put(part))
        got = [
            stages.ends[0][rank].get(f"b/rank0of1:{start}-{stop}", timeout=60)
            for rank, (start, stop) in enumerate(((0, 2), (2, 4)))
        ]
        merged = merge_heads([kv(one) for one in got], Shard(0, 1, (0, 4)))
        for one in got:
            one.release()
        for receipt in receipts:
            receipt.wait(timeout=60)
        assert isinstance(merged, KVCacheBundle)
        assert {name: contents(merged[name]) for name in merged} == {
            name: contents(data[name]) for name in data
        }


def test_pages_into_other_pages(sockets: str) -> None:
    """Two ranks' pools into the pools of one, with other blocks of another size."""
    topology, data = Topology(4, 2, 1), whole()
    where = {"kv_lens": [5], "ropes": [5]}

    def pools(heads: int, size: int) -> PagedCache:
        keys, values = (
            [torch.zeros(4, size, heads, 3).bfloat16() for _ in range(2)] for _ in range(2)
        )
        return PagedCache(keys, values, block_size=size, block_ids=[3, 1, 2])

    with ExitStack() as stack:
        stages = Stages("shm", sockets, topology, stack)
        for rank, link in enumerate(stages.served):
            engine, shard = pools(2, 2), topology.sender(rank)
            PagedAdapter().load(shard_of_cache(data, shard), engine)
            cache = PagedAdapter().export(
                engine, request_id="r", metadata={**where, "shard": shard}
            )
            for part in topology.sent_by(rank):
                link.put(part.of(cache))
        mine = PagedAdapter().export(pools(4, 4), request_id="r", metadata=where)
        fill(stages.get(0, "r"), mine)
        assert contents(mine) == contents(data)


def test_layer_by_layer(sockets: str) -> None:
    """The plan of a stream is sliced as a cache is."""
    (part,) = Topology(4, 1, 2).parts()[1:]
    data = whole()
    plan = KVCacheTransferData.blank(
        "r",
        row=(4, 3),
        dtype=torch.bfloat16,
        metadata={"kv_lens": [5], "ropes": [5], "num_layers": 2},
    )
    url = f"shm://heads-{next(_numbers)}"
    with (
        KVLink.serve(url, directory=sockets) as link,
        KVLink.connect(url, timeout=60, directory=sockets) as reader,
    ):
        tensors = part.of(data).tensors()
        with link.stream_put(part.of(plan)) as out:
            for layer in range(2):
                out.write_layer(layer, *tensors[2 * layer : 2 * layer + 2])
        with reader.get(part.key("r"), timeout=60, verify="full") as found:
            assert isinstance(found, KVCacheTransferData)
            assert contents(found) == contents(part.of(data))
            assert found.metadata.shard == part.shard


def test_a_latent_reaches_every_rank(sockets: str) -> None:
    topology, data = Topology(1, 2, 4), Recipe("m", latent=True).make()
    assert isinstance(data, KVCacheTransferData)
    with ExitStack() as stack:
        stages = Stages("shm", sockets, topology, stack)
        for rank, link in enumerate(stages.served):
            (part,) = topology.sent_by(rank)
            link.put(part.of(shard_of_latent(data, topology.sender(rank))), readers=2)
        for rank in range(4):
            got, shard = stages.get(rank, "m"), topology.receiver(rank)
            mine = blank_heads(kv(got[0]), shard, device=torch.device("cpu"))
            assert isinstance(mine, KVCacheTransferData)
            assert (mine.request_id, mine.metadata.shard) == ("m", shard)
            fill(got, mine)
            assert contents(mine) == contents(data)


RECEIVER = """
import hashlib, json, sys
import torch
from omni_kvlink import KVCacheTransferData, KVLink
from omni_kvlink.topology import Topology, head_targets

directory, rank, heads, receivers, *urls = sys.argv[1:]
topology, rank = Topology(int(heads), len(urls), int(receivers)), int(rank)
links = [KVLink.connect(url, timeout=60, directory=directory) for url in urls]
got = [
    links[part.shard.rank].get(part.key("r"), timeout=60) for part in topology.sent_to(rank)
]
about = {**got[0].data.metadata.to_dict(), "shard": topology.receiver(rank)}
start, stop = topology.receiver(rank).heads
tensors = [torch.zeros(5, stop - start, 3, dtype=torch.bfloat16) for _ in range(4)]
blocks = {"key_cache": tensors[:2], "value_cache": tensors[2:]}
mine = KVCacheTransferData("r", blocks, (), about)
for received, target in zip(got, head_targets([one.data for one in got], into=mine)):
    received.scatter(target)
    received.release()
hashes = [hashlib.sha256(one.view(torch.uint8).numpy().tobytes()) for one in mine.tensors()]
print(json.dumps([one.hexdigest() for one in hashes]))
for link in links:
    link.close()
"""


@pytest.mark.parametrize(("senders", "receivers", "heads"), [(1, 2, 4), (2, 1, 4), (2, 2, 2)])
def test_receivers_in_processes_of_their_own(
    senders: int, receivers: int, heads: int, sockets: str
) -> None:
    topology, data = Topology(heads, senders, receivers), whole(heads=heads)
    urls = [f"shm://heads-{next(_numbers)}" for _ in range(senders)]
    with ExitStack() as stack:
        links = [stack.enter_context(KVLink.serve(url, directory=sockets)) for url in urls]
        readers = [
            stack.enter_context(
                subprocess.Popen(
                    [
                        *(sys.executable, "-c", RECEIVER, sockets),
                        *map(str, (rank, heads, receivers)),
                        *urls,
                    ],
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(receivers)
        ]
        receipts = [
            link.put(
                part.of(shard_of_cache(data, topology.sender(rank))),
                readers=len(part.receivers),
                ttl=60,
            )
            for rank, link in enumerate(links)
            for part in topology.sent_by(rank)
        ]
        for rank, reader in enumerate(readers):
            found, _ = reader.communicate(timeout=600)
            expected = contents(shard_of_cache(data, topology.receiver(rank)))
            assert json.loads(found) == [hashlib.sha256(one).hexdigest() for one in expected]
        for receipt in receipts:
            receipt.wait(timeout=60)


NO_TEMPORARY = """
import sys
import torch
from omni_kvlink import KVCacheTransferData
from omni_kvlink.copier import NativeCopier, TorchCopier
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.topology import slice_heads
from support.processes.watermark import taken

copier = {"torch": TorchCopier, "native": NativeCopier}[sys.argv[1]]()
blocks = {name: [torch.ones(16384, 8, 64)] for name in ("key_cache", "value_cache")}
about = {"kv_lens": [16384], "ropes": [1], "num_layers": 1}
data = KVCacheTransferData("r", blocks, (), about)
part = slice_heads(data, 2, 6)  # 16 MiB of each 32
plan = part.plan()
region = Mapping.anonymous(plan.nbytes).region
manifest = plan.with_digests(copier.gather(part.tensors(), plan, region))
copier.scatter(manifest, region, part.tensors())
# Threads, their stacks and caches are there now, of both directions.
print(taken(lambda: copier.gather(slice_heads(data, 2, 6).tensors(), plan, region)))
print(taken(lambda: copier.scatter(manifest, region, slice_heads(data, 2, 6).tensors())))
print(taken(lambda: [tensor.contiguous() for tensor in part.tensors()]))
"""


@pytest.mark.parametrize("name", COPIERS)
def test_slices_need_no_temporary(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TEMPORARY, name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    gathered, scattered, contiguous = map(int, done.stdout.split())
    assert max(gathered, scattered) < 6 << 20
    assert contiguous > 25 << 20  # the measure does see a temporary
