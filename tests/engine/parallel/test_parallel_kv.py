"""Each rank of a stage receives its part of a KV over links, bit for bit, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVCacheBundle, KVCacheTransferData, Shard
from omni_kvlink.adapters import PagedAdapter, PagedCache
from omni_kvlink.engine import DiffusionKVManager, OmniDiffusionRequest
from omni_kvlink.engine.config import DiffusionParallelConfig, KVConfig
from omni_kvlink.engine.kv.kv_partition import KVPartition
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.kv.kv_state import KVState
from omni_kvlink.engine.kv.partitioned_source import PartitionedKVSource
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.errors import (
    IntegrityError,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.payload.bundle import PrefixOf, SameAs
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import Recipe, make_bundle
from omni_kvlink.topology import shard_of, slice_heads
from support.engine.fixtures import WAIT, bundle, request
from support.engine.parallel_ranks import EDIT, digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.engine.tokens.outputs import KVSent

pytestmark = pytest.mark.usefixtures("leaves_nothing")
_numbers = itertools.count()
HEADS = 4
DEGREES = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (2, 8), (8, 2)]
BRANCHES = ("gen", "cfg_text", "cfg_img")


class Stages:
    """The KV sinks of one stage, and the KV managers of the next."""

    def __init__(
        self,
        sockets: str,
        senders: int,
        guidance: int = 1,
        tensor: int = 1,
        degrees: dict[str, int] | None = None,
        **kv: Any,
    ):
        self.parallel = DiffusionParallelConfig(
            cfg_parallel_size=guidance, tensor_parallel_size=tensor, **(degrees or {})
        )
        options = {"directory": sockets}
        urls = tuple(f"shm://parts-{next(_numbers)}" for _ in range(senders))
        self.config = KVConfig(
            **{"sinks": urls, "sources": urls, "ttl": WAIT, "timeout": WAIT, **kv},
            sink_options={**options, "quota": 16 << 20},
            source_options=options,
            receivers=self.parallel,
        )
        self.stack = ExitStack()
        self.kv_sinks = [
            self._own(KVSink(self.config, heads=HEADS, tensor=rank)) for rank in range(senders)
        ]
        self.managers: dict[RankCoords, DiffusionKVManager] = {}
        partition = KVPartition(HEADS, senders, self.parallel)
        for rank in range(self.parallel.world_size):
            coords = RankCoords.of(rank, self.parallel)
            source = self._own(PartitionedKVSource.connect_parts(self.config, partition, coords))
            self.managers[coords] = self._own(DiffusionKVManager(source, self.config))

    def send(self, data: KVCacheBundle, *, streamed: bool = False) -> list[Any]:
        return [
            (stream if streamed else KVSink.send)(
                kv_sink, self.part_of(data, shard_of(rank, len(self.kv_sinks), heads=HEADS))
            )
            for rank, kv_sink in enumerate(self.kv_sinks)
        ]

    def part_of(self, data: KVCacheBundle, shard: Shard) -> KVCacheBundle:
        """A rank's part of a cache."""
        if shard.world == 1:
            return data
        branches: dict[str, Any] = {}
        for name, branch in slice_heads(data, *shard.heads).branches.items():
            metadata = dataclasses.replace(data[name].metadata, shard=shard)
            if isinstance(branch, KVCacheTransferData):
                blocks = branch.layer_blocks
                branches[name] = KVCacheTransferData(
                    data.request_id, blocks, branch.block_ids, metadata
                )
            else:
                assert isinstance(branch, PrefixOf | SameAs)
                branches[name] = dataclasses.replace(branch, metadata=metadata)
        return KVCacheBundle(data.request_id, branches)

    def all_is_released(self, deadline: float = WAIT) -> bool:
        """Whether no sink has memory in use or pending receives within `deadline` seconds."""
        end = time.monotonic() + deadline
        while self._is_busy() and time.monotonic() < end:
            time.sleep(0.01)
        return not self._is_busy()

    def _is_busy(self) -> bool:
        found = [kv_sink.link.stats() for kv_sink in self.kv_sinks]
        return any(one["memory"]["used"] or one["transfers"]["waiting"] for one in found)

    def _own(self, thing: Any) -> Any:
        self.stack.callback(thing.close)
        return thing


@pytest.fixture
def stages(sockets: str) -> Iterator[Any]:
    made: list[Stages] = []

    def make(*args: Any, **kv: Any) -> Stages:
        made.append(Stages(sockets, *args, **kv))
        return made[-1]

    yield make
    for one in made:
        one.stack.close()


def finish(manager: DiffusionKVManager, *kv_request: OmniDiffusionRequest) -> list[KVState]:
    """Wait until their receives have ended."""
    over = threading.Condition()

    def wake() -> None:
        with over:
            over.notify_all()

    def states() -> list[KVState]:
        return [manager.state(one.request_id) for one in kv_request]

    manager.listen(wake)
    with over:
        assert over.wait_for(lambda: KVState.RECEIVING not in states(), WAIT)
    return states()


def begin(manager: DiffusionKVManager, name: str, **fields: Any) -> OmniDiffusionRequest:
    kv_request = request(name, **fields)
    manager.allocate(kv_request)
    manager.prefetch(kv_request)
    return kv_request


def bits(data: KVCacheBundle, names: Any, start: int, stop: int) -> dict[str, list[str]]:
    return {
        name: [digest(dense(view)[:, start:stop]) for view in data[name].tensors()]
        for name in names
    }


def stream(kv_sink: KVSink, data: KVCacheBundle) -> KVSent:
    """Send a KV layer by layer, the last layer first; each leaves when it is written."""
    sending = kv_sink.open()
    sending.begin(data)
    for name, branch in data.branches.items():
        if isinstance(branch, KVCacheTransferData):
            for layer in reversed(range(branch.metadata.num_layers)):
                sending.write_layer(layer, name)
    # Which layers have left before the end is seen in the stream alone.
    assert not sending._layers, "these did not leave"
    return sending.finish()


def edit(name: str, tokens: int = 9) -> KVCacheBundle:
    """gen, cfg_text as its prefix, cfg_img of its own; 4 KV heads."""
    return make_bundle(Recipe(name, heads=HEADS, tokens=tokens))


@pytest.mark.parametrize("guidance", [1, 2, 3])
@pytest.mark.parametrize(("senders", "tensor"), DEGREES)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_bit_exact(stages: Any, streamed: bool, senders: int, guidance: int, tensor: int) -> None:
    setup, data = stages(senders, guidance, tensor), edit("r")
    sent = setup.send(data, streamed=streamed)
    for coords, manager in setup.managers.items():
        kv_request = begin(manager, "r", kv_nbytes=sent[0].nbytes)
        assert finish(manager, kv_request) == [KVState.READY], manager.error("r")
        got = manager.get_kv_cache("r")
        names = list(data)[coords.guidance :: guidance]
        heads = shard_of(coords.tensor, tensor, heads=HEADS).heads
        assert list(got) == names
        assert bits(got, names, 0, HEADS) == bits(data, names, *heads)
        for name in names:
            ours, theirs = data[name].metadata, got[name].metadata
            assert (ours.kv_lens, ours.ropes) == (theirs.kv_lens, theirs.ropes)
            if tensor > 1:
                assert theirs.shard.heads == heads
        assert got[names[0]].metadata.extra == data["gen"].metadata.extra
        assert manager.stats()["charged"] <= sent[0].nbytes + 64  # as much as was reserved
        del got
        manager.free(kv_request)
    assert setup.all_is_released()


@pytest.mark.parametrize("guidance", [1, 2])
@pytest.mark.parametrize(
    ("senders", "tensor", "degrees"),
    [
        (1, 1, {"ulysses_degree": 2}),
        (2, 2, {"ulysses_degree": 4}),
        (1, 1, {"ring_degree": 2}),
        (2, 1, {"ulysses_degree": 2, "ring_degree": 2}),
        (1, 1, {"pipeline_parallel_size": 2}),
        (2, 1, {"pipeline_parallel_size": 2, "ring_degree": 2}),
    ],
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_heads_of_ulysses_ranks_and_layers_of_pipeline_ranks_are_bit_exact(
    stages: Any,
    streamed: bool,
    senders: int,
    tensor: int,
    degrees: dict[str, int],
    guidance: int,
) -> None:
    """Ranks of a ring receive the same part; the sender's memory is released after the last."""
    setup, data = stages(senders, guidance, tensor, degrees), edit("r")
    sent, heads_of = setup.send(data, streamed=streamed), tensor * degrees.get("ulysses_degree", 1)
    ranks = degrees.get("pipeline_parallel_size", 1)
    for coords, manager in setup.managers.items():
        kv_request = begin(manager, "r", kv_nbytes=sent[0].nbytes)
        assert finish(manager, kv_request) == [KVState.READY], manager.error("r")
        got = manager.get_kv_cache("r")
        own = shard_of(coords.kv_rank(setup.parallel), heads_of, heads=HEADS).heads
        for name in list(data)[coords.guidance :: guidance]:
            count = data[name].metadata.num_layers
            layers = range(count)[coords.pipeline * count // ranks :][: count // ranks]
            found, whole = got[name].layer_blocks, data[name].layer_blocks
            assert got[name].metadata.num_layers == len(layers)
            for kind in whole:
                right = [whole[kind][layer] for layer in layers]
                assert [one if one is None else digest(dense(one)) for one in found[kind]] == [
                    one if one is None else digest(dense(one)[:, slice(*own)]) for one in right
                ]
            known = got[name].metadata.extra.get("layers")
            assert known == ([layers.start, layers.stop] if ranks > 1 else None)
        assert manager.stats()["charged"] <= sent[0].nbytes + 64
        del got, found
        manager.free(kv_request)
    assert setup.all_is_released()


def test_an_undivided_kv_is_sent_unchanged(stages: Any) -> None:
    """From one rank to one: under the request's own id, with references between branches."""
    setup, data = stages(1), edit("r")
    (sent,) = setup.send(data)
    (manager,) = setup.managers.values()
    kv_request = begin(manager, "r")
    assert finish(manager, kv_request) == [KVState.READY]
    got = manager.get_kv_cache("r")
    assert data.difference(got) == ""
    assert isinstance(got.branches["cfg_text"], PrefixOf)
    assert sent.nbytes == manager.stats()["charged"]
    del got
    manager.free(kv_request)


def test_a_prefix_of_a_branch_on_another_rank_is_sent_with_its_own_tensors(stages: Any) -> None:
    """From a paged cache, too; of two references to a branch elsewhere, one has the tensors."""
    pools = [torch.arange(2 * 4 * 2 * HEADS * 3).reshape(8, 2, HEADS, 3).float() for _ in range(4)]
    cache = PagedCache(pools[:2], pools[2:], block_size=2, block_ids=[5, 1, 3])
    gen = PagedAdapter().export(cache, request_id="r", metadata={"kv_lens": [5], "ropes": [5]})

    def about(tokens: int) -> Any:
        return dataclasses.replace(gen.metadata, kv_lens=(tokens,), ropes=(tokens,), seq_len=tokens)

    data = KVCacheBundle(
        "r",
        {
            "gen": gen,
            "a": PrefixOf("gen", 3, about(3)),
            "b": SameAs("gen"),
            "c": PrefixOf("gen", 4, about(4)),
        },
    )
    setup = stages(1, 2)
    setup.send(data)
    for coords, manager in setup.managers.items():
        kv_request = begin(manager, "r")
        assert finish(manager, kv_request) == [KVState.READY], manager.error("r")
        got = manager.get_kv_cache("r")
        names = list(data)[coords.guidance :: 2]
        assert bits(got, names, 0, HEADS) == bits(data, names, 0, HEADS)
        kinds = {name: type(got.branches[name]) for name in names}
        if coords.guidance:
            assert kinds == {"a": PrefixOf, "c": KVCacheTransferData}
        else:
            assert kinds == {"gen": KVCacheTransferData, "b": SameAs}
        del got
        manager.free(kv_request)


@pytest.mark.parametrize("guidance", [1, 2])
def test_only_the_heads_and_branches_of_a_rank_are_sent(stages: Any, guidance: int) -> None:
    setup, data = stages(1, guidance, 2), edit("r", tokens=400)
    whole = data.plan().nbytes
    (sent,) = setup.send(data)
    assert sent.nbytes < 0.6 * whole
    received = [begin(manager, "r") for manager in setup.managers.values()]
    for manager, kv_request in zip(setup.managers.values(), received, strict=True):
        finish(manager, kv_request)
        assert 0 < manager.stats()["nbytes"] <= sent.nbytes
        manager.free(kv_request)


def send_corrupted(setup: Stages, data: KVCacheBundle) -> None:
    """Send a KV whose second part has one wrong bit."""
    setup.kv_sinks[0].send(setup.part_of(data, shard_of(0, 2, heads=HEADS)))
    sender = setup.kv_sinks[1]
    # A sink sends what it is given: the wrong bit comes between its digest and its memory.
    part = sender._parts[0].cut(setup.part_of(data, shard_of(1, 2, heads=HEADS)))
    capacity = sender.link.allocate(part)
    for target, source in zip(capacity.data.tensors(), part.tensors(), strict=True):
        target.copy_(source)
    wrong = capacity.data["gen"].layer_blocks["key_cache"][1].view(torch.int16)
    sender.link.put(capacity.data)
    wrong[1, 0, 1] ^= 1


@pytest.mark.parametrize("fault", ["failed", "failed first", "corrupt", "late", "closed"])
def test_a_part_that_does_not_arrive_fails_the_request(stages: Any, fault: str) -> None:
    setup, data = stages(2, 1, 1), edit("r")
    (manager,) = setup.managers.values()
    if fault == "corrupt":
        send_corrupted(setup, data)
        kv_request = begin(manager, "r")
        kind: type[Exception] = IntegrityError
    else:
        kv_request = begin(manager, "r", kv_timeout=0.5 if fault == "late" else None)
        if fault != "failed first":
            setup.kv_sinks[0].send(setup.part_of(data, shard_of(0, 2, heads=HEADS)))
        kind = {"late": TransferTimeout, "closed": PeerLostError}.get(fault, TransferFailed)
        if fault.startswith("failed"):
            setup.kv_sinks[1].fail("r", "out of blocks")
        elif fault == "closed":
            setup.kv_sinks[1].close()
    assert finish(manager, kv_request) == [KVState.FAILED]
    assert isinstance(manager.error("r"), kind), manager.error("r")
    manager.free(kv_request)
    assert manager.stats()["charged"] == 0
    del setup.kv_sinks[1]  # it may be closed
    assert setup.all_is_released()


def test_freeing_a_request_cancels_every_part(stages: Any) -> None:
    setup = stages(2, 1, 1)
    (manager,) = setup.managers.values()
    kv_request = begin(manager, "r")
    setup.kv_sinks[0].send(setup.part_of(edit("r"), shard_of(0, 2, heads=HEADS)))
    manager.free(kv_request)
    assert setup.all_is_released()


def test_a_failure_reaches_every_rank(stages: Any) -> None:
    setup = stages(1, 2, 2)
    kv_request = [begin(manager, "r") for manager in setup.managers.values()]
    setup.kv_sinks[0].fail("r", "out of blocks")
    for manager, one in zip(setup.managers.values(), kv_request, strict=True):
        assert finish(manager, one) == [KVState.FAILED]
        assert "out of blocks" in str(manager.error("r"))


def test_a_kv_of_another_partition_is_reported(stages: Any) -> None:
    """The stage before sends a whole KV where parts are expected: an error at the deadline."""
    setup = stages(1, 2)
    setup.kv_sinks[0].link.put(edit("r"))
    for coords, manager in setup.managers.items():
        kv_request = begin(manager, "r", kv_timeout=0.3)
        assert finish(manager, kv_request) == [KVState.FAILED]
        error = manager.error("r")
        assert isinstance(error, TransferTimeout)
        assert f"r/cfg{coords.guidance}of2" in str(error)
        assert "kv.receivers" in str(error)


def test_a_kv_that_cannot_be_partitioned_is_refused(stages: Any) -> None:
    setup = stages(1, 3)
    one = Recipe("s", heads=HEADS).make()
    with pytest.raises(SchemaError, match="no branch for guidance rank"):
        setup.kv_sinks[0].send(one)
    with pytest.raises(SchemaError, match="must divide"):
        KVPartition(3, 1, DiffusionParallelConfig(tensor_parallel_size=2))


@pytest.mark.parametrize("prompt", ["a fox", EDIT])
def test_bagels_own_bundles(stages: Any, prompt: Any) -> None:
    """An empty cfg_text, and a cfg_img that is the same as gen or has tensors of its own."""
    setup, data = stages(1, 3), bundle("r", prompt, shape=(16, 24))
    setup.send(data)
    for coords, manager in setup.managers.items():
        kv_request = begin(manager, "r")
        assert finish(manager, kv_request) == [KVState.READY], manager.error("r")
        got, name = manager.get_kv_cache("r"), BRANCHES[coords.guidance]
        assert bits(got, [name], 0, 2) == bits(data, [name], 0, 2)
        assert got[name].metadata.extra["generator"] == data["gen"].metadata.extra["generator"]
        assert got[name].metadata.image_shape == data["gen"].metadata.image_shape
        del got
        manager.free(kv_request)
